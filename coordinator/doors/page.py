"""The page and `/metrics` on an address of their own, for people on this host and for Prometheus.

    /  /page.css  /page.js     the page           /events     its snapshots, live (server-sent events)
    /metrics                   Prometheus         /snapshot   one of them (JSON)

Not here: what is counted and how it reads (metrics), what a snapshot says (page.snapshot). Invariants: GET and HEAD
only; a request that names any other host than this one is refused, so that a web page whose name was pointed here (DNS
rebinding) reads nothing; no other origin is ever allowed, nor starts a stream; the page loads nothing but its own two
files and talks to nobody but this address; once there are keys, every route needs one, as at the doors or as the
password that a browser asks for; at most one reading of `/metrics` at a time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

from coordinator import limits
from coordinator.apis.writer import Event
from coordinator.auth import Auth
from coordinator.config import Address
from coordinator.doors.listen import ProtocolLog, listen_http
from coordinator.doors.origin import LOCAL_NAMES, host_name
from coordinator.doors.refusals import ShapedRunner
from coordinator.doors.sse import EventStream
from coordinator.errors import Refused, SlowReader, Unauthorized
from coordinator.fleet.lane_view import Roster
from coordinator.page.assets import Asset, load
from coordinator.page.gauges import Gauges
from coordinator.page.live import Live
from coordinator.serving import Serving
from coordinator.telemetry.metrics import CONTENT_TYPE, Metrics

_HEADERS: Final = {
    hdrs.SERVER: "expressway",  # and no versions
    hdrs.CACHE_CONTROL: "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Page:
    """The open page."""

    address: Address
    _runner: web.AppRunner
    _gauges: Gauges
    _live: Live

    async def close(self) -> None:
        """Closes it; readings under way end first, streams at once."""
        self._live.end()
        await self._runner.cleanup()
        await self._live.__aexit__()
        self._gauges.close()


async def start_page(
    metrics: Metrics, roster: Roster, serving: Serving, owner_socket: Path | None, address: Address
) -> Page:
    """Opens the page. BadAddress when the address cannot be listened on."""
    gauges = Gauges(roster, serving, owner_socket)
    live = Live(gauges, roster, serving.journal, metrics.outcomes)
    runner = ShapedRunner(
        build_app(metrics, gauges, live, address.host, serving.auth),
        shape=lambda error, _: _refusal(error.http, error.message),
        access_log=None,
        logger=ProtocolLog(),
        handler_cancellation=True,  # a stream whose reader is gone ends
        keepalive_timeout=limits.IDLE_CONNECTION_S,
        shutdown_timeout=limits.GRPC_CLOSE_S,
    )
    await live.__aenter__()
    try:
        return Page(await listen_http(runner, address), runner, gauges, live)
    except BaseException:
        await runner.cleanup()
        await live.__aexit__()
        gauges.close()
        raise


def build_app(metrics: Metrics, gauges: Gauges, live: Live, host: str, auth: Auth) -> web.Application:
    """The application that listens on `host`."""
    names = LOCAL_NAMES | {host}
    reading = asyncio.Lock()

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if host_name(request.headers.get(hdrs.HOST, "")) not in names:
            return _refusal(403, "this page answers to names of this host only")
        try:
            auth.tenant(*_keys(request))
        except Unauthorized as error:
            refusal = _refusal(401, f"{error.message}; in a browser, as the password")
            refusal.headers[hdrs.WWW_AUTHENTICATE] = 'Basic realm="expressway", charset="UTF-8"'
            return refusal
        return await handler(request)

    async def show_metrics(request: web.Request) -> web.Response:
        async with reading:
            pieces = []
            for piece in metrics.pieces(gauges.state(await gauges.owner())):
                pieces.append(piece)
                await asyncio.sleep(0)
        return web.Response(body=b"".join(pieces), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def show_snapshot(request: web.Request) -> web.Response:
        if _from_elsewhere(request):
            return _refusal(403, "other sites read nothing here")
        return web.Response(text=await live.read(), content_type="application/json")

    async def show_events(request: web.Request) -> web.StreamResponse:
        if _from_elsewhere(request):
            return _refusal(403, "other sites read nothing here")
        stream = EventStream(request, {})
        try:
            async with contextlib.aclosing(live.watch()) as snapshots:
                async for snapshot in snapshots:
                    await stream.send(Event(snapshot))
        except Refused as error:
            return _refusal(503, error.message)
        except (SlowReader, ConnectionError):
            pass  # cut off, or gone
        return await stream.begin()

    app = web.Application(client_max_size=limits.KIB, middlewares=[admit])
    app.on_response_prepare.append(_plain_headers)
    app.router.add_get("/metrics", show_metrics)  # and HEAD
    app.router.add_get("/snapshot", show_snapshot)
    app.router.add_get("/events", show_events, allow_head=False)
    for asset in load():
        app.router.add_get(asset.path, _show(asset))
    return app


def _show(asset: Asset) -> Handler:
    async def show(request: web.Request) -> web.Response:
        return web.Response(body=asset.body, headers={hdrs.CONTENT_TYPE: asset.content_type})

    return show


def _keys(request: web.Request) -> tuple[str | None, str | None]:
    """The headers in which a key may stand; of a browser's name and password, the password."""
    authorization, api_key = request.headers.get(hdrs.AUTHORIZATION), request.headers.get("x-api-key")
    if authorization and authorization.lower().startswith("basic "):
        try:
            name_and_password = base64.b64decode(authorization[len("basic ") :], validate=True).decode()
            return None, name_and_password.partition(":")[2]
        except ValueError:
            return None, None
    return authorization, api_key


def _from_elsewhere(request: web.Request) -> bool:
    """Whether a browser asks on behalf of another site, which would read nothing but take a watcher's place."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=_HEADERS)


async def _plain_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
