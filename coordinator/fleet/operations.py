"""What operators do with lanes while the cluster serves: drain, undrain, rolling restart, add, remove.

      restart:  for each lane   drain ─▶ nothing runs there ─▶ stop ─▶ start ─▶ ready ─▶ undrain

Not here: the wire (doors.admin), states (fleet), processes (supervisor). Invariants: no stream is cut, a lane is
stopped only when nothing of ours runs there; one operation at a time, so that two of them never take all lanes out of
service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.errors import LaneNotFound, OperationFailed
from coordinator.fleet.hosts import Hosts


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is."""

    lane: str
    state: str
    doing: str  # draining | stopping | starting | done
    running: int


class Operations:
    """On one roster; `running` says how many requests a lane has."""

    def __init__(self, roster: Hosts, running: Callable[[str], int]) -> None:
        self._roster, self._running = roster, running
        self._one = asyncio.Lock()

    async def drain(self, lane: str, *, stop: bool) -> AsyncGenerator[Progress, None]:
        """Ends when nothing runs there any more, and with `stop` when its process has ended."""
        names = self._meant(lane)
        async with self._one:
            for name in names[1:]:  # of a host: none of them takes over what another one gives away
                self._roster.drain(name, returns=False)
            for name in names:
                async for progress in self._drain(name, returns=False):
                    yield progress
                if stop:
                    yield self._progress(name, "stopping")
                    await self._roster.stop(name)
                yield self._progress(name, "done")

    def undrain(self, lane: str) -> Progress:
        """Into service again; of several, how the last one is."""
        names = self._meant(lane)
        for name in names:
            self._roster.undrain(name)
        return self._progress(names[-1], "done")

    async def restart(self, lanes: Sequence[str]) -> AsyncGenerator[Progress, None]:
        """One after the other; all of them when none is named."""
        names = [name for lane in lanes for name in self._meant(lane)]
        async with self._one:
            for name in names or self._names():
                async for progress in self._restart(name):
                    yield progress

    async def add(self, host: str = "") -> str:
        """The name of the new lane, on the coordinator's own host unless another one is named."""
        async with self._one:
            return await self._roster.add_lane(host)

    async def remove(self, lane: str) -> AsyncGenerator[Progress, None]:
        """Drained, stopped, forgotten."""
        self._check(lane)
        async with self._one:
            if len(self._names()) == 1:
                raise OperationFailed("the last lane cannot be removed")
            async for progress in self._drain(lane, returns=False):
                yield progress
            yield self._progress(lane, "stopping")
            await self._roster.stop(lane)
            await self._roster.remove_lane(lane)
            yield Progress(lane, "draining", "done", 0)

    async def _restart(self, lane: str) -> AsyncGenerator[Progress, None]:
        async for progress in self._drain(lane, returns=True):
            yield progress
        try:
            yield self._progress(lane, "stopping")
            await self._roster.stop(lane)
        finally:  # whoever asked may be gone by now: the lane comes back all the same
            self._roster.undrain(lane)
        deadline = asyncio.get_running_loop().time() + limits.LANE_START_S
        while self._state(lane) != "ready":
            if self._state(lane) == "quarantined" or asyncio.get_running_loop().time() > deadline:
                raise OperationFailed(f"{lane} did not come back; the lanes after it were left alone")
            yield self._progress(lane, "starting")
            await asyncio.sleep(limits.OPERATION_LOOK_S)
        yield self._progress(lane, "done")

    async def _drain(self, lane: str, *, returns: bool) -> AsyncGenerator[Progress, None]:
        self._roster.drain(lane, returns=returns)
        try:
            while self._running(lane):
                yield self._progress(lane, "draining")
                await asyncio.sleep(limits.OPERATION_LOOK_S)
        except (asyncio.CancelledError, GeneratorExit):
            if returns:  # a restart that nobody waits for any more has not happened
                self._roster.undrain(lane)
            raise

    def _meant(self, lane: str) -> list[str]:
        """One lane, or with HOST/ all those of a host."""
        names = [name for name in self._names() if lane.endswith("/") and name.startswith(lane)] or [lane]
        self._check(names[0])
        return names

    def _check(self, lane: str) -> None:
        if lane not in self._names():
            raise LaneNotFound(f"there is no lane {lane[:64]!r}")

    def _names(self) -> list[str]:
        return [view.name for view in self._roster.lanes()]

    def _state(self, lane: str) -> str:
        return next((view.state for view in self._roster.lanes() if view.name == lane), "draining")

    def _progress(self, lane: str, doing: str) -> Progress:
        return Progress(lane, self._state(lane), doing, self._running(lane))
