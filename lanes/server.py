"""The lane's door: lane.proto over one Unix socket.

Not here: what a generation does (engine), what a request may hold (request). Nothing waits in this file without a
bound: a client that stops reading, freezes or vanishes loses its generation, never the lane.

Invariants: a stream is Accepted, chunks of tokens, one Finished, in that order, or a gRPC error before Accepted; a
stream that ends early, for whatever reason, has stopped its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from laneproto.v1 import lane_pb2 as pb
from laneproto.v1 import lane_pb2_grpc as rpc
from lanes import limits, wire
from lanes.engine import Engine
from lanes.errors import ERROR_CODE_METADATA, BadProtocolVersion, LaneError, SlowReader, StartError, grpc_status
from lanes.experts.cache import Cached
from lanes.outbox import End, Outbox, Token
from lanes.request import Bounds, parse
from lanes.state.prefixes import PrefixLog

_log = structlog.get_logger(__name__)

_OPTIONS = [
    ("grpc.max_receive_message_length", limits.MAX_RECEIVE_BYTES),
    ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
    ("grpc.max_concurrent_streams", limits.MAX_STREAMS_PER_CONNECTION),
    ("grpc.keepalive_time_ms", limits.KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", limits.KEEPALIVE_TIMEOUT_MS),  # the one that counts: its default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", limits.KEEPALIVE_TIME_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.MIN_CLIENT_PING_INTERVAL_MS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", limits.LOOKAHEAD_BYTES),
    ("grpc.so_reuseport", 0),
]


class LaneServer(rpc.LaneServicer):
    """Serves one engine; create and use it on one event loop."""

    def __init__(
        self,
        engine: Engine,
        identity: wire.Identity,
        prefixes: PrefixLog | None = None,
        cached: Callable[[], Cached] = Cached,
    ) -> None:
        self._engine, self._cached = engine, cached
        self._prefixes = PrefixLog() if prefixes is None else prefixes
        self._identity = identity
        self._bounds = Bounds(identity.vocab_size, identity.context_tokens)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced at every change of state
        self._streams: set[asyncio.Task[None]] = set()
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.fatal = asyncio.Event()
        self.draining = asyncio.Event()
        engine.on_change = lambda: self._from_engine(self._announce)
        engine.on_fatal = lambda: self._from_engine(self.fatal.set)

    async def start(self, path: Path) -> None:
        """Listens on the socket, mode 0600 in a directory of mode 0700; raises StartError."""
        prepare_socket(path)
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=limits.MAX_CONCURRENT_CALLS)
        rpc.add_LaneServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            raise StartError(f"{path}: cannot listen there") from None
        os.chmod(path, 0o600)  # the umask has made it so already; this holds whatever gRPC does
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._server = server

    async def drain(self) -> None:
        """Takes nothing new; returns at once."""
        self._engine.drain()
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self.draining.set()

    async def idle(self) -> None:
        """Returns when no generation runs and every stream has ended."""
        while True:
            changed = self._changed
            if not self._engine.status().request_ids and not self._streams:
                return
            await changed.wait()

    async def stop(self, grace_s: float) -> None:
        """Stops listening; streams that still run end after the grace."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    async def Hello(self, request: pb.HelloRequest, context: grpc.aio.ServicerContext) -> pb.HelloReply:
        """Who this lane is."""
        if request.protocol_version != limits.PROTOCOL_VERSION:
            await _refuse(context, BadProtocolVersion(f"protocol_version: {limits.PROTOCOL_VERSION} is spoken here"))
        return wire.hello_reply(self._identity, self._status(), limits.PROTOCOL_VERSION)

    async def Watch(self, request: pb.WatchRequest, context: grpc.aio.ServicerContext) -> None:
        """Status at every change of state and at least every half second."""
        while True:
            changed = self._changed
            await context.write(self._status())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), limits.WATCH_INTERVAL_S)

    async def Prefixes(self, request: pb.PrefixesRequest, context: grpc.aio.ServicerContext) -> None:
        """Everything that can be gone on from, then every change."""
        seen: int | None = None
        while True:
            changed = self._changed
            for news in self._prefixes.after(seen):
                await context.write(wire.prefix_event(news))
                seen = news.sequence
            with contextlib.suppress(TimeoutError):  # checkpoints are made inside a generation, without an announcement
                await asyncio.wait_for(changed.wait(), limits.WATCH_INTERVAL_S)

    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelReply:
        """Stops a generation within one step."""
        return pb.CancelReply(found=self._engine.cancel(request.request_id))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainReply:
        """The process ends with exit code 0 when nothing runs any more."""
        await self.drain()
        return pb.DrainReply()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """One generation."""
        outbox = Outbox(self._loop, limits.OUTBOX_TOKENS)
        try:
            generation = self._engine.submit(parse(request, self._bounds), outbox)
        except LaneError as error:
            await _refuse(context, error)
            return
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        slow: SlowReader | None = None
        try:
            await self._stream(outbox, context)
        except SlowReader as error:
            slow = error
        finally:
            generation.cancel()  # no effect on one that has ended
            outbox.close()
            self._streams.discard(task)
            self._announce()
        if slow is not None:
            _log.warning("slow_reader", request_id=request.request_id)
            await _refuse(context, slow)

    async def _stream(self, outbox: Outbox, context: grpc.aio.ServicerContext) -> None:
        await _write(context, pb.GenerateEvent(accepted=pb.Accepted(stamp_ns=time.monotonic_ns())))
        while True:
            tokens: list[Token] = []
            end: End | None = None
            for event in await outbox.take():
                if isinstance(event, End):
                    end = event
                else:
                    tokens.append(event)
            for first in range(0, len(tokens), limits.CHUNK_TOKENS):
                await _write(context, wire.token_chunk(tokens[first : first + limits.CHUNK_TOKENS]))
            if end is not None:
                await _write(context, wire.finished(end, self._identity.approximations))
                return

    def _status(self) -> pb.LaneStatus:
        return wire.lane_status(self._engine.status(), time.monotonic_ns(), self._prefixes, self._cached())

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _from_engine(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call)


def prepare_socket(path: Path) -> None:
    """Makes the directory (0700) or refuses one that others may enter; removes a dead lane's socket only."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.parent.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StartError(f"{path.parent}: a socket's directory must be the user's own and of mode 0700")
        if path.is_socket():
            _refuse_living(path)
            path.unlink()
        elif path.exists() or path.is_symlink():
            raise StartError(f"{path}: exists and is no socket")
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None


def _refuse_living(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # a dead process's name
    raise StartError(f"{path}: a living process serves there")


async def _write(context: grpc.aio.ServicerContext, event: pb.GenerateEvent) -> None:
    """Writes one event; raises SlowReader when the client leaves no room for it for too long."""
    try:
        async with asyncio.timeout(limits.SLOW_READER_S):
            await context.write(event)
    except TimeoutError:
        raise SlowReader("the client stopped reading") from None


async def _refuse(context: grpc.aio.ServicerContext, error: LaneError) -> None:
    metadata = ((ERROR_CODE_METADATA, error.code),)
    await context.abort(grpc_status(error), str(error), trailing_metadata=metadata)
