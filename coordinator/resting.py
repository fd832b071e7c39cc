"""Processes of lanes that get no work for now: those that said "busy", and those whose stream broke.

Not here: what becomes of their requests (dispatch), whether they are killed (fleet). Invariant: a process whose stream
broke gets work again only when the roster has seen its end, or it says itself that it no longer runs that request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator import limits
from coordinator.errors import LaneError
from coordinator.fleet.lane_view import Roster
from coordinator.policy.affinity import Seat
from coordinator.tasks import Tasks


class RestingSeats:
    """The processes that rest; `on_release` is called when one may work again."""

    def __init__(self, roster: Roster, tasks: Tasks, on_release: Callable[[], None]) -> None:
        self._roster, self._tasks, self._on_release = roster, tasks, on_release
        self._seats: set[Seat] = set()
        self._pauses_s: dict[Seat, float] = {}  # how long a process that said "busy" was left alone last

    def __contains__(self, seat: Seat) -> bool:
        return seat in self._seats

    def busy(self, seat: Seat) -> None:
        """It takes nothing new: left alone for a moment, each time for longer."""
        pause_s = min(2 * self._pauses_s.get(seat, limits.BUSY_PAUSE_S / 2), limits.BUSY_PAUSE_MAX_S)
        self._pauses_s[seat] = pause_s
        self._seats.add(seat)
        self._tasks.spawn(self._rest(seat, pause_s))

    def well(self, seat: Seat) -> None:
        """It took a request."""
        self._pauses_s.pop(seat, None)

    def lost(self, seat: Seat, request_id: str) -> None:
        """Its stream broke, and maybe it still computes."""
        self._seats.add(seat)
        self._tasks.spawn(self._probe(seat, request_id))

    def keep(self, living: set[Seat]) -> None:
        """Forget how long dead processes were busy."""
        self._pauses_s = {seat: pause_s for seat, pause_s in self._pauses_s.items() if seat in living}

    async def _rest(self, seat: Seat, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._release(seat)

    async def _probe(self, seat: Seat, request_id: str) -> None:
        while True:
            await asyncio.sleep(limits.LOST_PROBE_S)
            view = next((view for view in self._roster.lanes() if view.name == seat.lane), None)
            if view is None or view.state != "ready" or view.incarnation != seat.incarnation:
                break
            try:
                client = self._roster.client(seat.lane)
                hello = await client.hello()
                if hello.incarnation != seat.incarnation or request_id not in hello.status.request_ids:
                    break
                await client.cancel(request_id)
            except (LaneError, KeyError):
                continue
        self._release(seat)

    def _release(self, seat: Seat) -> None:
        self._seats.discard(seat)
        self._on_release()
