"""What is shown of a cluster at one moment: lanes, their totals, queue, model and region.

Not here: where it comes from (page.gauges), how it reads (metrics_state, page.snapshot). Invariant: plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.fleet.lane_view import LaneView, ModelView, RegionView
from coordinator.host.owner_status import OwnerStatus
from coordinator.policy.kept import Kept


@dataclass(frozen=True, slots=True)
class State:
    """The cluster at one moment."""

    lanes: Sequence[LaneView]
    totals: Mapping[str, Mapping[str, int]]  # by lane: counts that never fall, and levels
    running: Mapping[str, int]  # by lane: requests dispatched and not ended
    queued: int
    queue_limit: int
    model: ModelView | None
    owner: OwnerStatus | None  # None: it does not answer
    owner_restarts: int
    regions: Sequence[RegionView] = ()  # of all hosts; `owner` is fresher for the coordinator's own
    conversations: Sequence[Kept] = ()  # of the sessions that asked last
