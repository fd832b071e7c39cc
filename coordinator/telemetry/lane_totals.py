"""Counters of lanes that never fall: a lane's own begin at zero with every new process.

        life 1        life 2
    0 … 120 (dies) | 0 … 30      total: 0 … 120 … 150

Not here: reading lanes (roster), names of metrics (metrics_state). Pure. Invariant: a total never falls while this
object lives; what a lane counted after its last sign of life is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.fleet.lane_view import LaneView
from laneproto.v1 import lane_pb2

FIELDS = tuple(field.name for field in lane_pb2.Counters.DESCRIPTOR.fields)
# sizes now; the other fields count
LEVELS = frozenset({"cache_used_bytes", "cache_budget_bytes", "state_used_bytes", "state_budget_bytes"})


@dataclass(slots=True)
class _Lane:
    incarnation: bytes
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))  # of the lives that are over
    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))


class LaneTotals:
    """Totals by lane. `look` at the views after every change and before every reading."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def look(self, views: Iterable[LaneView]) -> None:
        """Take over what the lanes have counted by now."""
        for view in views:
            lane = self._lanes.setdefault(view.name, _Lane(view.incarnation))
            if view.incarnation and view.incarnation != lane.incarnation:
                lane.before = {name: lane.before[name] + lane.now[name] for name in FIELDS}
                lane.now = dict.fromkeys(FIELDS, 0)
                lane.incarnation = view.incarnation
            for name in FIELDS:
                seen = int(getattr(view.counters, name))
                # A view without an incarnation shows the last counters of a dead process, or none: never less.
                lane.now[name] = seen if name in LEVELS else max(lane.now[name], seen)

    def of(self, lane: str) -> Mapping[str, int]:
        """Counts of all lives so far, and the levels as they are now; zeros for a lane not seen yet."""
        known = self._lanes.get(lane) or _Lane(b"")
        return {name: known.now[name] + (0 if name in LEVELS else known.before[name]) for name in FIELDS}
