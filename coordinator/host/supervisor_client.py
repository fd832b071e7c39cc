"""The coordinator's side of supervisor.sock: what runs on this host, and requests to start and stop.

Not here: decisions (fleet). Invariant: a snapshot is whole; the stream of snapshots is in order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from coordinator.fleet.states import Observed
from laneproto.v1 import keeper_pb2, keeper_pb2_grpc

REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """One process as the supervisor reports it."""

    name: str
    address: str
    observed: Observed


class SupervisorUnavailable(Exception):
    """The supervisor does not answer, or refused; the message says why."""


class SupervisorClient:
    """Calls to the supervisor of this host."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)],
        )
        self._stub = keeper_pb2_grpc.KeepersStub(self._channel)

    async def watch(self) -> AsyncIterator[tuple[SeenProcess, ...]]:
        """The state now and after every change, until the supervisor goes away (SupervisorUnavailable)."""
        try:
            async for snapshot in self._stub.Watch(keeper_pb2.WatchRequest(), wait_for_ready=True):
                yield tuple(_seen(process) for process in snapshot.processes)
        except grpc.aio.AioRpcError as error:
            raise SupervisorUnavailable(error.details()) from None
        raise SupervisorUnavailable("the supervisor ended the watch")

    async def start(self, name: str) -> None:
        """Start the process now."""
        await self._call(self._stub.Start, keeper_pb2.ProcessName(name=name))

    async def stop(self, name: str, grace_s: float) -> None:
        """SIGTERM, SIGKILL after the grace; without a grace it is a kill and counts as a crash."""
        await self._call(
            self._stub.Stop, keeper_pb2.StopRequest(name=name, grace_s=grace_s), REQUEST_TIMEOUT_S + grace_s
        )

    async def add_lane(self) -> str:
        """One more lane; its name."""
        reply: keeper_pb2.ProcessName = await self._call(self._stub.AddLane, keeper_pb2.AddLaneRequest())
        return reply.name

    async def remove_lane(self, name: str) -> None:
        """Forget a lane that does not run."""
        await self._call(self._stub.RemoveLane, keeper_pb2.ProcessName(name=name))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _call(self, method: Any, request: object, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise SupervisorUnavailable(error.details()) from None


def _seen(process: keeper_pb2.Process) -> SeenProcess:
    exited = process.phase == keeper_pb2.PROCESS_PHASE_EXITED
    return SeenProcess(
        process.name,
        process.address,
        Observed(
            running=process.phase == keeper_pb2.PROCESS_PHASE_RUNNING,
            starts=process.starts,
            pid=process.pid,
            exit_code=process.exit_code if exited else None,
        ),
    )
