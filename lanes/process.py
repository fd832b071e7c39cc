"""The life of a lane's process: start, serve, drain or fail, exit code.

    exit 0    drained (SIGTERM, SIGINT or the Drain call)
    exit 64   an option was refused
    exit 65   the lane could not start: pack, region, kernel or self-test
    exit 70   the engine failed or answered NaN; the request's stream was told first

Not here: who restarts it (the keeper) and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from lanes import limits
from lanes.config import LaneConfig
from lanes.errors import EXIT_ENGINE, EXIT_START, LaneError, StartError
from lanes.logs import configure_logging
from lanes.models.errors import ModelError
from lanes.server import LaneServer, prepare_socket
from lanes.startup import Lane, assemble
from lanes.state.errors import StateError
from shared_experts.errors import SharedExpertsError

_log = structlog.get_logger(__name__)


def run(config: LaneConfig) -> int:
    """Runs one lane to its end and returns the exit code."""
    configure_logging(json_lines=config.log_json, lane=config.name)
    try:
        prepare_socket(config.listen)  # before minutes of loading, not after
        lane = assemble(config)
    except (LaneError, ModelError, StateError, SharedExpertsError) as error:
        return _refused(error.code, str(error))
    except OSError as error:
        return _refused(StartError.code, f"{error.filename or config.pack}: {error.strerror}")
    gc.freeze()  # a lane's weights and tables live for ever: no collection walks them again
    with lane.resources:
        try:
            return asyncio.run(_serve(lane, config))
        except (LaneError, SharedExpertsError) as error:
            return _refused(error.code, str(error))
        finally:
            lane.engine.stop()


async def _serve(lane: Lane, config: LaneConfig) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = LaneServer(lane.engine, lane.identity, lane.prefixes, lane.cached)
    with contextlib.ExitStack() as stack:
        await server.start(config.listen)
        stack.callback(config.listen.unlink, missing_ok=True)
        lane.engine.start()
        _log.info(
            "lane_ready",
            seconds=round(_process_age_s(), 3),
            model=lane.identity.model_name,
            device=lane.identity.device,
            region_bytes=lane.region.mapped_bytes,
            cache_bytes=lane.engine.status().counters.cache_budget_bytes,
            context_tokens=lane.identity.context_tokens,
        )
        await _first(ended.wait(), server.draining.wait(), server.fatal.wait())
        if not server.fatal.is_set():
            _log.info("lane_draining")
            await server.drain()
            # The Drain call waits for what runs, however long; a signal waits DRAIN_S.
            await _first(server.idle(), ended.wait(), server.fatal.wait())
            await _first(server.idle(), server.fatal.wait(), asyncio.sleep(limits.DRAIN_S))
        if server.fatal.is_set():
            await _first(server.idle(), asyncio.sleep(limits.FLUSH_S))
        else:
            lane.engine.cancel_all()
            await _first(server.idle(), server.fatal.wait(), asyncio.sleep(limits.FLUSH_S))
        await server.stop(limits.STOP_GRACE_S)
    code = EXIT_ENGINE if server.fatal.is_set() else 0
    _log.info("lane_exit", code=code)
    return code


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of the coroutines has; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _process_age_s() -> float:
    """Since this process was created: the interpreter's start and every import included."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def _refused(code: str, reason: str) -> int:
    _log.error("lane_start_failed", code=code, reason=reason)
    print(f"error: {code}: {reason}", file=sys.stderr)  # the line that `expressway serve` shows, as every command ends
    return EXIT_START
