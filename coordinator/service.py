"""The coordinator process put together: supervisor's client, roster, doors; and its end.

Not here: each of those. Invariant: on SIGTERM it takes no new request, lets running ones go on for the drain time, ends
the rest with one error each, and exits 0.
"""

from __future__ import annotations

import asyncio
import signal

import structlog

from coordinator.config import CoordinatorConfig
from coordinator.frontdoor import start_doors
from coordinator.roster import FleetRoster
from coordinator.supervisor_client import SupervisorClient

log = structlog.get_logger()


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Serve until SIGTERM. A `SetupError` says why the doors cannot be opened."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    supervisor = SupervisorClient(config.supervisor)
    try:
        async with FleetRoster(supervisor) as roster:
            doors = await start_doors(roster, config.pack, http=config.http, grpc_at=config.grpc)
            log.info("serving", http=str(doors.http), grpc=str(doors.grpc))
            await stop.wait()
            log.info("draining", at_most_s=config.drain_s)
            await doors.close(config.drain_s)
    finally:
        await supervisor.close()
