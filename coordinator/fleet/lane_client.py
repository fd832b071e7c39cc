"""The coordinator's end of `lane.proto`: one channel to one lane, gRPC errors turned into this package's own.

Not here: which lane, when, and what a loss means (dispatch, fleet). Invariant: whatever goes wrong on the wire leaves
this file as a `LaneError`; cancelling the reader of `generate` ends the call, and the lane treats that as a cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from coordinator import limits
from coordinator.errors import LaneBusy, LaneError, LaneFailed, LaneLost, LaneRejected, LaneTimeout
from coordinator.fleet.link import Link
from laneproto.v1 import lane_pb2, lane_pb2_grpc

PROTOCOL_VERSION = 1
ERROR_CODE_KEY = "expressway-error-code"

_BUSY_CODES = frozenset({"busy", "draining"})  # refusals before Accepted: another lane, or later

_T = TypeVar("_T")

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.GRPC_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # two clients of one address (before and after a restart) share nothing
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),  # between hosts: a dead peer is noticed without traffic
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.default_authority", "lane"),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),  # a retry inside the library could start a generation twice
]


@dataclass(frozen=True, slots=True)
class LaneAccepted:
    """The lane has begun."""

    stamp_ns: int


@dataclass(frozen=True, slots=True)
class LaneTokens:
    """Tokens in the order they were chosen."""

    tokens: Sequence[lane_pb2.Token]


@dataclass(frozen=True, slots=True)
class LaneFinished:
    """The last event: the lane is free."""

    reason: lane_pb2.FinishReason
    usage: lane_pb2.Usage
    counters: lane_pb2.Counters
    error_code: str
    error_message: str


LaneEvent = LaneAccepted | LaneTokens | LaneFinished


class LaneClient:
    """One lane, by address, or of another host by its name there. Close it when the lane is gone for good."""

    def __init__(self, address: str, *, name: str, link: Link | None = None) -> None:
        self.name = name
        self.address = address
        self._channel = (
            link.channel(address, _OPTIONS) if link else grpc.aio.insecure_channel(address, options=_OPTIONS)
        )
        self._stub = lane_pb2_grpc.LaneStub(self._channel)

    async def hello(self, *, timeout_s: float = limits.CALL_TIMEOUT_S) -> lane_pb2.HelloReply:
        """Who is there."""
        request = lane_pb2.HelloRequest(protocol_version=PROTOCOL_VERSION)
        reply: lane_pb2.HelloReply = await self._call(self._stub.Hello, request, timeout_s)
        if reply.protocol_version != PROTOCOL_VERSION:
            raise LaneRejected(f"{self.name} speaks protocol {reply.protocol_version}, not {PROTOCOL_VERSION}")
        return reply

    async def generate(self, request: lane_pb2.GenerateRequest) -> AsyncGenerator[LaneEvent, None]:
        """Events in order. Ends after `LaneFinished`; raises `LaneLost` when the stream ends without one."""
        with self._reading(self._stub.Generate, request) as call:
            async for event in call:
                match event.WhichOneof("event"):
                    case "accepted":
                        yield LaneAccepted(event.accepted.stamp_ns)
                    case "tokens":
                        yield LaneTokens(event.tokens.tokens)
                    case "finished":
                        done = event.finished
                        yield LaneFinished(done.reason, done.usage, done.counters, done.error_code, done.error_message)
                        return
                    case _:
                        raise LaneFailed(f"{self.name} sent an event that this coordinator does not know")
            raise LaneLost(f"{self.name} ended its stream without a last event")

    async def cancel(self, request_id: str) -> bool:
        """Asks the lane to stop a generation; whether it knew it. The stream's `LaneFinished` is the confirmation."""
        request = lane_pb2.CancelRequest(request_id=request_id)
        reply: lane_pb2.CancelReply = await self._call(self._stub.Cancel, request)
        return reply.found

    async def watch(self) -> AsyncGenerator[lane_pb2.LaneStatus, None]:
        """The lane's status, now and after every change, at least once a second."""
        with self._reading(self._stub.Watch, lane_pb2.WatchRequest()) as call:
            async for status in call:
                yield status
            raise LaneLost(f"{self.name} ended its status stream")

    async def prefixes(self) -> AsyncGenerator[lane_pb2.PrefixEvent, None]:
        """What the lane remembers: all of it in snapshots, then every change. Ends with a gap in the numbers."""
        last: int | None = None
        with self._reading(self._stub.Prefixes, lane_pb2.PrefixesRequest()) as call:
            async for event in call:
                if not event.snapshot and last is not None and event.sequence != last + 1:
                    return
                last = event.sequence
                yield event

    async def drain(self) -> None:
        """The lane takes no new generation, finishes the running one and exits."""
        await self._call(self._stub.Drain, lane_pb2.DrainRequest())

    async def close(self) -> None:
        """Ends every call on this client and the connection."""
        await self._channel.close()

    async def _call(
        self, method: Callable[..., Awaitable[_T]], request: object, timeout_s: float = limits.CALL_TIMEOUT_S
    ) -> _T:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        except grpc.aio.UsageError:  # the channel is closed
            raise LaneLost(f"{self.name} went away") from None

    @contextlib.contextmanager
    def _reading(self, method: Callable[..., Any], request: object) -> Iterator[Any]:
        """A call whose answers are a stream; its errors are ours. It ends with the block, whoever ends that."""
        try:
            call = method(request)
        except grpc.aio.UsageError:
            raise LaneLost(f"{self.name} went away") from None
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            raise self._typed(error) from error
        except asyncio.CancelledError:
            self._raise_if_closed()
            raise
        finally:
            call.cancel()  # nothing to do after the end; else the lane learns that nobody listens

    def _raise_if_closed(self) -> None:
        """A closed channel cancels its calls: a lost lane to the reader, unless the reader itself is cancelled."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise LaneLost(f"{self.name} went away") from None

    def _typed(self, error: grpc.aio.AioRpcError) -> LaneError:
        reported = cast("str | None", dict(error.trailing_metadata() or ()).get(ERROR_CODE_KEY))
        detail = f" ({reported})" if reported else ""
        if reported in _BUSY_CODES:
            return LaneBusy(f"{self.name} takes no new work{detail}")
        match error.code():
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                return LaneLost(f"{self.name} went away")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return LaneTimeout(f"{self.name} did not answer in time")
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE | grpc.StatusCode.ALREADY_EXISTS:
                return LaneRejected(f"{self.name} refused the request{detail}")
            case _:
                return LaneFailed(f"{self.name} failed{detail}")
