"""A host of another one's cluster, from its first process to its last: what `expressway cluster join` does.

    gate ◀── TLS ── coordinator        joiner ── TLS ──▶ coordinator
      ├──▶ supervisor.sock ── owner, lanes: as in a cluster of one host, but nobody here decides when they start again
      └──▶ lane-k.sock

Not here: options and printing (cli.cluster), the coordinator (fleet.hosts). Invariant: however `run_member` ends, no
process of the host is left and its run directory is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from coordinator.config import Address, choose_address
from coordinator.cores import layout
from coordinator.doors.hosts import Served
from coordinator.errors import Interrupted, StartFailed
from coordinator.host.clusters import clear_stale
from coordinator.host.gate import Gate
from coordinator.host.identity import Identity
from coordinator.host.joiner import Joined, Joiner
from coordinator.host.lane_options import LaneOptions
from coordinator.host.plan import lane_adder, plan_host
from coordinator.host.rundir import RunDir
from coordinator.host.signals import Signals
from coordinator.host.startup import OnProgress, check_alive
from coordinator.host.supervisor import Supervisor, serve_keepers
from coordinator.host.topology import allowed_cores
from coordinator.launchers.local import LocalLauncher
from coordinator.pack_facts import PackFacts, read_fingerprint
from coordinator.tasks import first

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Everything `expressway cluster join` was asked for."""

    lane: LaneOptions
    cluster: str  # name of the run directory
    lanes: int
    head: str  # HOST:PORT of the coordinator's door for hosts
    gate: Address  # where the coordinator reaches this host
    identity: Path
    cores_per_lane: int | None
    drain_s: float
    start_timeout_s: float
    park_bytes: int = 0
    park_disk_bytes: int = 0
    suffix: str = ""  # of its name, where its certificate is other hosts', too
    facts: PackFacts | None = None  # what a lane that is added is counted by


@dataclass(frozen=True, slots=True)
class Member:
    """A host whose lanes serve."""

    config: MemberConfig  # with the port that was chosen
    name: str
    run_dir: Path
    seconds: float
    pids: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """As `--ready-json` prints it."""
        return {
            "ready": True,
            "host": self.name,
            "head": self.config.head,
            "gate": str(self.config.gate),
            "run_dir": str(self.run_dir),
            "pids": dict(self.pids),
            "ready_s": round(self.seconds, 3),
            "pack": str(self.config.lane.pack),
        }


async def run_member(
    config: MemberConfig, env: Mapping[str, str], on_progress: OnProgress, on_ready: Callable[[Member], None]
) -> None:
    """Start everything, join, go on until SIGINT or SIGTERM, leave, stop everything. A `CoordinatorError` says why it
    could not be done; `Interrupted`, that the signal came before its lanes served."""
    signals = Signals()
    signals.listen()
    identity = Identity.load(config.identity)
    served = Served.of(await asyncio.to_thread(read_fingerprint, config.lane.pack), config.lane.alike())
    allowed = allowed_cores()
    cores = layout(allowed, config.lanes, config.cores_per_lane, gpu=config.lane.device == "cuda").lanes
    os.umask(0o077)
    async with contextlib.AsyncExitStack() as ends:
        run_dir = RunDir.claim(config.cluster, env)
        ends.callback(run_dir.release)
        clear_stale(env)
        config = replace(config, gate=choose_address(config.gate))
        added = lane_adder(config.lane, config.park_bytes, config.facts, allowed, run_dir, env)
        processes = plan_host(config.lane, config.park_bytes, config.park_disk_bytes, run_dir, cores, env)
        supervisor = Supervisor(processes, LocalLauncher(), plan_lane=added)
        ends.push_async_callback(supervisor.close)
        owner_socket = run_dir.socket("owner")
        keepers = await serve_keepers(supervisor, run_dir.socket("supervisor"), owner_socket)
        ends.push_async_callback(keepers.stop, 0.0)
        gate = Gate(identity, run_dir.path)
        ends.push_async_callback(gate.close)
        await gate.open(config.gate)
        joiner = await ends.enter_async_context(Joiner(config.head, identity, served, config.gate, config.suffix))
        life = _Life(supervisor, config, run_dir, on_progress, on_ready)
        await signals.heed(life.run(joiner))
        await _in_order(joiner, supervisor, config.drain_s, signals)
    if not life.served:
        raise Interrupted("stopped before it was ready", signals.first)


async def _in_order(joiner: Joiner, supervisor: Supervisor, drain_s: float, signals: Signals) -> None:
    """Leave, then stop; at once when a second signal comes."""

    async def orderly() -> None:
        await joiner.leave(drain_s)
        await supervisor.shutdown(0.0)

    await first(orderly(), signals.now.wait())


class _Life:
    """From the start of the processes on: joins, and says once that all lanes serve."""

    def __init__(
        self,
        supervisor: Supervisor,
        config: MemberConfig,
        run_dir: RunDir,
        on_progress: OnProgress,
        on_ready: Callable[[Member], None],
    ) -> None:
        self._supervisor, self._config, self._run_dir = supervisor, config, run_dir
        self._on_progress, self._on_ready = on_progress, on_ready
        self._began = time.monotonic()
        self.served = False

    async def run(self, joiner: Joiner) -> None:
        """Ends only by an error: `StartFailed`, or what the coordinator has against this host."""
        self._run_dir.write_cluster({"ready": False, "head": self._config.head, "cluster": self._config.cluster})
        await self._supervisor.start_all()
        await joiner.stay(self._told)

    def _told(self, joined: Joined | None) -> None:
        if self.served:
            return
        check_alive(self._supervisor)
        seconds = time.monotonic() - self._began
        if joined is None or joined.ready < self._config.lanes:
            self._on_progress({
                "coordinator": "joined" if joined else "does not answer",
                "lanes": f"{joined.ready if joined else 0} of {self._config.lanes} ready",
            })  # fmt: skip
            if seconds > self._config.start_timeout_s:
                raise StartFailed(f"not ready after {self._config.start_timeout_s:g} s")
            return
        self.served = True
        pids = {"supervisor": os.getpid(), **{name: each.pid for name, each in self._supervisor.keepers.items()}}
        self._on_ready(Member(self._config, joined.name, self._run_dir.path, seconds, pids))
