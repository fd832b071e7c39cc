"""The coordinator process put together: supervisor's client, roster, doors, page; and its end.

Not here: each of those. Invariant: on SIGTERM it takes no new request, lets running ones go on for the drain time, ends
the rest with one error each, and exits 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator

import structlog

from coordinator import limits
from coordinator.auth import Auth
from coordinator.config import CoordinatorConfig
from coordinator.doors.admin import admin_door
from coordinator.doors.hosts import Served, host_door
from coordinator.doors.page import start_page
from coordinator.fleet.hosts import Hosts
from coordinator.fleet.memory import FleetMemory
from coordinator.fleet.operations import Operations
from coordinator.fleet.other_host import OtherHosts
from coordinator.fleet.roster import FleetRoster
from coordinator.frontdoor import Doors, start_doors
from coordinator.host.identity import Identity
from coordinator.host.owner_status import ask_owner
from coordinator.host.supervisor_client import SupervisorClient
from coordinator.pack_facts import read_fingerprint
from coordinator.pauses import leave_out_of_search
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.spans import SpanWriter
from coordinator.telemetry.trace_writer import TraceWriter

log = structlog.get_logger()


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Serve until SIGTERM. A `SetupError` says why the doors cannot be opened."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    supervisor = SupervisorClient(config.supervisor)
    try:
        memory = FleetMemory(config.run_dir / "fleet.json")
        path, identity, fingerprint = config.owner_socket, None, b""
        owner = functools.partial(asyncio.to_thread, ask_owner, path, limits.OWNER_ASK_S) if path else None
        if config.hosts is not None:
            identity = Identity.load(config.hosts.identity)
            fingerprint = await asyncio.to_thread(read_fingerprint, config.pack)
        async with (
            contextlib.AsyncExitStack() as ends,
            Hosts(
                await ends.enter_async_context(FleetRoster(supervisor, owner=owner, memory=memory)),
                OtherHosts(config.run_dir, identity, fingerprint).open,
            ) as roster,
        ):
            metrics = Metrics() if config.page else None
            traces = TraceWriter.open(config.trace_requests) if config.trace_requests else None
            if traces is not None:
                ends.push_async_callback(asyncio.to_thread, traces.close)
            spans = SpanWriter.open(config.otlp) if config.otlp else None
            if spans is not None:
                ends.push_async_callback(asyncio.to_thread, spans.close)
            doors = await start_doors(
                roster,
                config.pack,
                http=config.http,
                grpc_at=config.grpc,
                recorder=metrics,
                journal=Journal(*(writer.write for writer in (traces, spans) if writer is not None)),
                auth=Auth(config.tenants),
                tls=config.tls,
            )
            operations = Operations(roster, doors.serving.dispatcher.running)
            joining: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
            if config.hosts and identity:
                served = Served.of(fingerprint, config.hosts.alike)
                joining = host_door(roster, served, doors.serving.dispatcher.running, identity, config.hosts.address)
            async with (
                joining,
                _page(metrics, roster, doors, config),
                admin_door(operations, config.run_dir / "coordinator.sock", doors.serving),
            ):
                log.info("serving", http=str(doors.http), grpc=str(doors.grpc), page=str(config.page or "off"))
                leave_out_of_search()
                await stop.wait()
                log.info("draining", at_most_s=config.drain_s)
                await doors.close(config.drain_s)
    finally:
        await supervisor.close()


@contextlib.asynccontextmanager
async def _page(metrics: Metrics | None, roster: Hosts, doors: Doors, config: CoordinatorConfig) -> AsyncIterator[None]:
    """The page, when there is to be one: open until the doors are closed, so that a drain can be watched."""
    if metrics is None or config.page is None:
        yield
        return
    page = await start_page(metrics, roster, doors.serving, config.owner_socket, config.page)
    try:
        yield
    finally:
        await page.close()
