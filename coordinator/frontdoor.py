"""The request side put together: text, dispatch and both doors on one roster, opened and closed as one.

Not here: processes, configuration. Invariants: Unix sockets are 0600; when `start_doors` raises, nothing is left
listening; `close` answers every waiting and running request with an error before the last connection goes.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator import limits
from coordinator.auth import Auth
from coordinator.config import Address
from coordinator.dispatch import Dispatcher
from coordinator.doors.grpc import SERVICE, ExpresswayServicer, server_options
from coordinator.doors.guard import Guard
from coordinator.doors.health import HealthFollower
from coordinator.doors.http import build_app
from coordinator.doors.listen import ProtocolLog, listen_http
from coordinator.doors.refusals import ShapedRunner
from coordinator.errors import BadAddress
from coordinator.fleet.lane_view import Roster
from coordinator.generation_config import GenerationConfig
from coordinator.grpc_server import start_server
from coordinator.pack_facts import read_digests
from coordinator.serving import Serving
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.stats import Recorder
from coordinator.text.chat_format import ChatFormat
from coordinator.text.desk import TextDesk
from coordinator.text.tokenizer import Tokenizer
from coordinator.tls import Tls
from laneproto.v1 import serve_pb2_grpc


@dataclass(frozen=True, slots=True)
class Doors:
    """Open doors: where they listen, and the way to close them."""

    http: Address
    grpc: Address
    serving: Serving
    _runner: web.AppRunner
    _server: aio.Server
    _health: HealthFollower

    async def close(self, grace_s: float = 0.0) -> None:
        """No new requests; running ones get `grace_s` to end, then they are cancelled."""
        await self._health.close()
        await self.serving.dispatcher.close(grace_s)
        await self._server.stop(limits.GRPC_CLOSE_S)
        await self._runner.cleanup()
        self.serving.close()


async def start_doors(
    roster: Roster,
    tokenizer_dir: Path,
    *,
    http: Address,
    grpc_at: Address,
    queue_requests: int = limits.QUEUE_REQUESTS,
    recorder: Recorder | None = None,
    journal: Journal | None = None,
    auth: Auth | None = None,
    tls: Tls | None = None,
) -> Doors:
    """Opens both doors. `tokenizer_dir` holds the pack's tokenizer and generation config, or none of them; with a
    manifest beside them, only files that it names, as it has them.

    Raises `SetupError`.
    """
    digests = await asyncio.to_thread(read_digests, tokenizer_dir)
    tokenizer = await asyncio.to_thread(Tokenizer.load, tokenizer_dir, digests)
    generation = await asyncio.to_thread(GenerationConfig.load, tokenizer_dir, digests)
    chat_format = await asyncio.to_thread(ChatFormat.load, tokenizer_dir, digests)
    dispatcher = Dispatcher(roster, queue_bound=queue_requests)
    serving = Serving(roster, dispatcher, TextDesk(tokenizer, chat_format), generation, recorder, journal, auth)
    health = HealthFollower(roster, SERVICE)
    await health.follow()
    runner = _runner(serving)
    server = _server(serving, health)
    try:
        bound_grpc = await _listen_grpc(server, grpc_at, tls)
        bound_http = await listen_http(runner, http, tls.context() if tls else None)
    except BaseException:
        await health.close()
        await serving.dispatcher.close()
        await server.stop(None)
        await runner.cleanup()
        serving.close()
        raise
    return Doors(bound_http, bound_grpc, serving, runner, server, health)


def _runner(serving: Serving) -> web.AppRunner:
    return ShapedRunner(
        build_app(serving, started=int(time.time())),
        access_log=None,
        logger=ProtocolLog(),
        handler_cancellation=True,  # a client that is gone cancels its handler, and so its request
        keepalive_timeout=limits.IDLE_CONNECTION_S,
        shutdown_timeout=limits.DOOR_CLOSE_S,
    )


def _server(serving: Serving, health: HealthFollower) -> aio.Server:
    servicer = ExpresswayServicer(serving)
    guard = Guard(serving.auth, servicer.head_checks())
    server = aio.server(interceptors=[guard], options=server_options(), maximum_concurrent_rpcs=limits.GRPC_CALLS)
    serve_pb2_grpc.add_ExpresswayServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    return server


async def _listen_grpc(server: aio.Server, address: Address, tls: Tls | None) -> Address:
    credentials = tls.credentials() if tls else None
    umask = os.umask(0o177)  # the socket is 0600 from its first moment
    try:
        port = (
            server.add_secure_port(str(address), credentials) if credentials else server.add_insecure_port(str(address))
        )
    except RuntimeError as error:
        raise BadAddress(f"{address}: cannot listen there") from error
    finally:
        os.umask(umask)
    await start_server(server)
    return address if address.path else replace(address, port=port)
