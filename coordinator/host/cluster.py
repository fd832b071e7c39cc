"""A cluster on this host from the first process to the last: what `expressway serve` does.

Not here: options and printing (cli.serve), decisions about restarts (fleet, in the coordinator process). Invariant:
however `run_cluster` ends, no process of the cluster is left and the run directory is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from coordinator import limits
from coordinator.config import Address, ServeConfig, choose_address
from coordinator.cores import Layout, layout
from coordinator.errors import BadAddress, Interrupted, RunDirError
from coordinator.host.clusters import clear_stale, who_listens
from coordinator.host.plan import lane_adder, plan_cluster
from coordinator.host.rundir import RunDir
from coordinator.host.signals import Signals
from coordinator.host.startup import OnProgress, Ready, wait_ready
from coordinator.host.supervisor import COORDINATOR, Supervisor, serve_keepers
from coordinator.host.topology import allowed_cores
from coordinator.launchers import open_launcher

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster: where, and which processes."""

    config: ServeConfig  # with the ports that were chosen
    cores: Layout
    run_dir: Path
    ready: Ready | None  # None while it starts
    pids: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """As `--ready-json` prints it and `cluster.json` keeps it."""
        return {
            "ready": self.ready is not None,
            "http": str(self.config.http),
            "grpc": str(self.config.grpc),
            "page": str(self.config.page) if self.config.page else None,
            "join_at": str(self.config.hosts.address) if self.config.hosts else None,
            "run_dir": str(self.run_dir),
            "pids": dict(self.pids),
            "cores": self.cores.told(),
            "ready_s": round(self.ready.seconds, 3) if self.ready else None,
            "model": self.ready.model if self.ready else None,
            "pack": str(self.config.lane.pack),
            "cluster": self.config.cluster,
            "launcher": self.config.launcher,
        }


async def run_cluster(
    config: ServeConfig, env: Mapping[str, str], on_progress: OnProgress, on_ready: Callable[[Running], None]
) -> None:
    """Start everything, wait until it serves, go on until SIGINT or SIGTERM, stop everything. A `SetupError` says why
    it could not be done; `Interrupted`, that the signal came before it served."""
    signals = Signals()
    signals.listen()
    allowed = allowed_cores()
    cores = layout(allowed, config.lanes, config.cores_per_lane, gpu=config.lane.device == "cuda")
    os.umask(0o077)
    run_dir = RunDir.claim(config.cluster, env)
    try:
        clear_stale(env)
        config = replace(
            config,
            http=free_address(config.http, env),
            grpc=free_address(config.grpc, env),
            page=config.page and free_address(config.page, env),
            hosts=config.hosts and replace(config.hosts, address=free_address(config.hosts.address, env)),
        )
        launcher = open_launcher(config.launcher, run_dir)
        signals.listen()  # again: Ray has put a handler of its own there
        try:
            added = lane_adder(config.lane, config.park_bytes, config.facts, allowed, run_dir, env)
            supervisor = Supervisor(plan_cluster(config, run_dir, cores, env), launcher, plan_lane=added)
            await _supervise(supervisor, config, cores, run_dir, signals, on_progress, on_ready)
        finally:
            await launcher.close()
    finally:
        run_dir.release()


def free_address(address: Address, env: Mapping[str, str]) -> Address:
    """As `choose_address`; who is there is named when it is one of our clusters."""
    try:
        return choose_address(address)
    except BadAddress as error:
        holder = who_listens(str(address), env)
        if holder is None:
            raise
        raise BadAddress(
            f"{error.message}: cluster {holder!r} listens there; stop it, or choose other addresses for this one"
        ) from None


async def _supervise(
    supervisor: Supervisor,
    config: ServeConfig,
    cores: Layout,
    run_dir: RunDir,
    signals: Signals,
    on_progress: OnProgress,
    on_ready: Callable[[Running], None],
) -> None:
    served = False

    def announce(running: Running) -> None:
        nonlocal served
        served = True
        on_ready(running)

    server = await serve_keepers(supervisor, run_dir.socket("supervisor"))
    try:
        await signals.heed(_live(supervisor, config, cores, run_dir, on_progress, announce))
    finally:
        await _shut_down(supervisor, config, signals.now)
        await server.stop(0.0)
    if not served:
        raise Interrupted("stopped before it was ready", signals.first)


async def _live(
    supervisor: Supervisor,
    config: ServeConfig,
    cores: Layout,
    run_dir: RunDir,
    on_progress: OnProgress,
    on_ready: Callable[[Running], None],
) -> None:
    """Start, wait until ready, then keep `cluster.json` true. It is there from the start, so that others know the
    addresses."""
    run_dir.write_cluster(Running(config, cores, run_dir.path, None, {"supervisor": os.getpid()}).to_json())
    await supervisor.start_all()
    door = f"unix:{run_dir.socket(COORDINATOR)}"  # opened after the public ones, and needs no key
    ready = await wait_ready(supervisor, run_dir.socket("owner"), door, config.start_timeout_s, on_progress)
    announced, stale = False, False
    while True:
        seen = supervisor.version
        pids = {"supervisor": os.getpid(), **{name: keeper.pid for name, keeper in supervisor.keepers.items()}}
        running = Running(config, cores, run_dir.path, ready, pids)
        try:
            run_dir.write_cluster(running.to_json())
            stale = False
        except RunDirError as error:  # a full disk is no reason to stop serving
            if not stale:
                log.warning("cluster.json is out of date", reason=str(error))
            stale = True
        if not announced:
            on_ready(running)
            announced = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.RUN_FILE_RETRY_S if stale else None):
                await supervisor.change(seen)


async def _shut_down(supervisor: Supervisor, config: ServeConfig, now: asyncio.Event) -> None:
    """In order and with patience, or at once when a second signal comes."""
    orderly = asyncio.create_task(supervisor.shutdown(config.drain_s + limits.COORDINATOR_STOP_S))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait({orderly, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not orderly.done():
        orderly.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await orderly
    await supervisor.close()
