"""The coordinator's side of a supervisor's socket: what runs on its host, and requests to start and stop.

Not here: decisions (fleet). Invariant: a snapshot is whole; the stream of snapshots is in order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from coordinator import limits
from coordinator.fleet.link import Link
from coordinator.fleet.states import Observed
from coordinator.host.owner_status import OWNER_STATES, OwnerStatus
from laneproto.v1 import keeper_pb2, keeper_pb2_grpc

REQUEST_TIMEOUT_S = 30.0
SUPERVISOR = "supervisor"
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """One process as the supervisor reports it."""

    name: str
    address: str
    observed: Observed


class SupervisorUnavailable(Exception):
    """The supervisor does not answer, or refused; the message says why."""


class SupervisorClient:
    """Calls to the supervisor of this host by its address, of another one by the link to it."""

    def __init__(self, where: str | Link) -> None:
        self._channel = (
            where.channel(SUPERVISOR, _OPTIONS)
            if isinstance(where, Link)
            else grpc.aio.insecure_channel(where, options=_OPTIONS)
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

    async def region(self) -> OwnerStatus | None:
        """How far the region of that host is; None when its owner does not answer."""
        reply: keeper_pb2.RegionReply = await self._call(
            self._stub.Region, keeper_pb2.RegionRequest(), limits.CALL_TIMEOUT_S
        )
        if reply.state not in OWNER_STATES:
            return None
        return OwnerStatus(
            reply.state, reply.done_bytes, reply.total_bytes, reply.source, reply.fingerprint, reply.generation
        )

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
