"""Brings together what `/metrics` and the page show of lanes, queue and region.

Not here: how it reads (metrics_state, snapshot). Invariant: a dead lane's last counters are taken over before they are
gone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from coordinator.fleet.lane_view import Roster
from coordinator.host.owner_status import OwnerStatus, ask_owner
from coordinator.serving import Serving
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.lane_totals import LaneTotals


class Gauges:
    """One per page."""

    def __init__(self, roster: Roster, serving: Serving, owner_socket: Path | None) -> None:
        self._roster, self._serving, self._owner_socket = roster, serving, owner_socket
        self._totals = LaneTotals()
        self._unsubscribe = roster.subscribe(self._look)
        self._look()

    async def owner(self) -> OwnerStatus | None:
        """What the region's owner says now; None when it does not answer in time."""
        return await asyncio.to_thread(ask_owner, self._owner_socket) if self._owner_socket else None

    def state(self, owner: OwnerStatus | None) -> State:
        """The cluster now."""
        self._look()
        lanes, dispatcher = self._roster.lanes(), self._serving.dispatcher
        return State(
            lanes=lanes,
            totals={lane.name: self._totals.of(lane.name) for lane in lanes},
            running={lane.name: dispatcher.running(lane.name) for lane in lanes},
            queued=dispatcher.queued,
            queue_limit=dispatcher.queue_bound,
            model=self._serving.known_model,
            owner=owner,
            owner_restarts=self._roster.owner_restarts(),
            regions=self._roster.regions(),
            conversations=dispatcher.conversations(),
        )

    def close(self) -> None:
        """Looks at lanes no more."""
        self._unsubscribe()

    def _look(self) -> None:
        self._totals.look(self._roster.lanes())
