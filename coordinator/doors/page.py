"""The page: `/metrics` on an address of its own, for Prometheus and for people on this host.

Not here: what is counted and how it reads (metrics). Invariants: GET and HEAD only; a request that names any other host
than this one is refused, so that a web page whose name was pointed here (DNS rebinding) reads nothing; no other origin
is ever allowed; at most one reading at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from coordinator import limits
from coordinator.config import Address
from coordinator.doors.listen import ProtocolLog, listen_http
from coordinator.lane_totals import LaneTotals
from coordinator.lane_view import Roster
from coordinator.metrics import CONTENT_TYPE, Metrics
from coordinator.metrics_state import State
from coordinator.owner_status import ask_owner
from coordinator.serving import Serving

_HOST = re.compile(r"(\[(?P<v6>[0-9A-Fa-f:]+)\]|(?P<name>[A-Za-z0-9.-]+))(:[0-9]{1,5})?")
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gauges:
    """Brings together what `/metrics` shows of lanes, queue and region."""

    def __init__(self, roster: Roster, serving: Serving, owner_socket: Path | None) -> None:
        self._roster, self._serving, self._owner_socket = roster, serving, owner_socket
        self._totals = LaneTotals()
        self._unsubscribe = roster.subscribe(self._look)  # a dead lane's last counters, before they are gone
        self._look()

    async def state(self) -> State:
        """The cluster now."""
        owner = await asyncio.to_thread(ask_owner, self._owner_socket) if self._owner_socket else None
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
        )

    def close(self) -> None:
        """Looks at lanes no more."""
        self._unsubscribe()

    def _look(self) -> None:
        self._totals.look(self._roster.lanes())


@dataclass(frozen=True, slots=True)
class Page:
    """The open page."""

    address: Address
    _runner: web.AppRunner
    _gauges: Gauges

    async def close(self) -> None:
        """Closes it; readings under way end first."""
        await self._runner.cleanup()
        self._gauges.close()


async def start_page(
    metrics: Metrics, roster: Roster, serving: Serving, owner_socket: Path | None, address: Address
) -> Page:
    """Opens the page. BadAddress when the address cannot be listened on."""
    gauges = Gauges(roster, serving, owner_socket)
    runner = web.AppRunner(
        build_app(metrics, gauges.state, address.host),
        access_log=None,
        logger=ProtocolLog(),
        keepalive_timeout=limits.IDLE_CONNECTION_S,
        shutdown_timeout=limits.GRPC_CLOSE_S,
    )
    try:
        return Page(await listen_http(runner, address), runner, gauges)
    except BaseException:
        await runner.cleanup()
        gauges.close()
        raise


def build_app(metrics: Metrics, state: Callable[[], Awaitable[State]], host: str) -> web.Application:
    """The application that listens on `host`."""
    names = _LOCAL_NAMES | {host}
    reading = asyncio.Lock()

    @web.middleware
    async def only_local_names(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _host_name(request.headers.get(hdrs.HOST, "")) not in names:
            return web.Response(status=403, text="this page answers to names of this host only\n")
        return await handler(request)

    async def show(request: web.Request) -> web.Response:
        async with reading:
            body = metrics.render(await state())
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    app = web.Application(client_max_size=limits.KIB, middlewares=[only_local_names])
    app.on_response_prepare.append(_plain_headers)
    app.router.add_get("/metrics", show)  # and HEAD
    return app


def _host_name(header: str) -> str | None:
    """The name in a Host header, without its port: a forwarded page has another port here than there."""
    found = _HOST.fullmatch(header)
    return found and (found["v6"] or found["name"]).lower()


async def _plain_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "expressway"  # and no versions
    response.headers[hdrs.CACHE_CONTROL] = "no-store"
    response.headers["x-content-type-options"] = "nosniff"
