"""The standard gRPC health service, kept in step with the roster.

Invariant: SERVING exactly while a lane is ready, for the server ("") and for its service.
"""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health, health_pb2

from coordinator.fleet.lane_view import Roster


class HealthFollower:
    """Owns the servicer; `follow` once, `close` at the end."""

    def __init__(self, roster: Roster, service: str) -> None:
        self.servicer = health.aio.HealthServicer()
        self._roster = roster
        self._names = ("", service)
        self._changed = asyncio.Event()
        self._unsubscribe = roster.subscribe(self._changed.set)
        self._task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """Sets the state now and after every change of the roster."""
        await self._set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """NOT_SERVING from now on."""
        self._unsubscribe()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.servicer.enter_graceful_shutdown()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._set()

    async def _set(self) -> None:
        ready = any(view.state == "ready" for view in self._roster.lanes())
        kinds = health_pb2.HealthCheckResponse
        for name in self._names:
            await self.servicer.set(name, kinds.SERVING if ready else kinds.NOT_SERVING)
