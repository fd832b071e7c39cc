"""Tells the coordinator, once a second, that this host is there; and at the end, that it goes.

Not here: what runs on the host (member), what is done with it (doors.hosts). Invariant: only the holder of the head's
certificate is told anything. A coordinator that does not answer is asked again for ever: it may come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from coordinator import limits
from coordinator.client import refusal
from coordinator.config import Address
from coordinator.doors.hosts import INCARNATION_BYTES, PROTOCOL_VERSION, Served
from coordinator.errors import CoordinatorError
from coordinator.host.identity import Identity, head_name
from laneproto.v1 import hosts_pb2, hosts_pb2_grpc

_PASSING = frozenset({"unreachable", "deadline_exceeded", "host_taken", "cancelled", "unavailable"})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Joined:
    """What the coordinator says of this host."""

    name: str
    lanes: int
    ready: int


class Joiner:
    """One per life of a host's supervisor. Use as an async context manager."""

    def __init__(self, head: str, identity: Identity, served: Served, gate: Address, suffix: str = "") -> None:
        self._request = hosts_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            version=served.version,
            fingerprint=served.fingerprint,
            address=str(gate),
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
            suffix=suffix,
            alike=served.alike,
        )
        self._channel = grpc.aio.secure_channel(
            head,
            identity.channel_credentials(),
            options=[
                ("grpc.ssl_target_name_override", head_name()),
                ("grpc.enable_http_proxy", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 500),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._stub = hosts_pb2_grpc.HostsStub(self._channel)
        self._has_joined = False

    async def __aenter__(self) -> Joiner:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def stay(self, tell: Callable[[Joined | None], None]) -> None:
        """`tell` of every answer, and None where there is none; raises what will not pass, before the first one."""
        said = ""
        while True:
            try:
                reply = await self._stub.Join(self._request, timeout=limits.CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                reason = refusal(error)
                if not self._has_joined and reason.code not in _PASSING:
                    raise reason from None
                said = _say_once(said, reason)
                tell(None)
            else:
                if not self._has_joined or said:
                    log.info("joined", host=reply.name)
                self._has_joined, said = True, ""
                tell(Joined(reply.name, reply.lanes, reply.lanes_ready))
            await asyncio.sleep(limits.JOIN_S)

    async def leave(self, patience_s: float) -> None:
        """No new work for this host; returns when its lanes have none, or after that long."""
        if not self._has_joined:
            return
        request = hosts_pb2.LeaveRequest(incarnation=self._request.incarnation, suffix=self._request.suffix)
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is gone, or the time is over: the lanes end all the same
            await self._stub.Leave(request, timeout=max(patience_s, limits.JOIN_S))


def _say_once(said: str, reason: CoordinatorError) -> str:
    if reason.message != said:
        log.warning("the coordinator does not take this host", reason=reason.message)
    return reason.message
