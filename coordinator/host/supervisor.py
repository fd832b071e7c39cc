"""The supervisor: processes by name, started and stopped on request, their state told to whoever watches.

It decides one thing alone: the coordinator, whom nobody else can restart, starts again after a backoff. When the owner
or a lane starts again is the coordinator's decision (fleet). Not here: what the processes are (plan), how they come to
life (launchers).

Invariant: per name at most one process runs; after `shutdown` none does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

from coordinator import limits
from coordinator.config import LANES_MAX
from coordinator.errors import CoordinatorError
from coordinator.fleet.states import OWNER, Backoff, FleetLimits
from coordinator.grpc_server import start_server
from coordinator.host.owner_status import ask_owner
from coordinator.host.vigil import Vigil
from coordinator.launchers.base import Launcher, ProcessHandle, ProcessSpec
from coordinator.tasks import Tasks
from laneproto.v1 import admin_pb2, admin_pb2_grpc, keeper_pb2, keeper_pb2_grpc

LOG_LIMIT_BYTES = 8 << 20
LOG_KEPT_BYTES = 1 << 20
LOG_CHECK_S = 5.0
COORDINATOR = "coordinator"
PING_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Managed:
    """A process and, for a lane, where it will listen; for the coordinator, where it can be asked whether it lives."""

    spec: ProcessSpec
    address: str = ""
    ping: str = ""  # where it answers a ping: killed when it does not


@dataclass(slots=True)
class Keeper:
    """What is known about one process. Exit code None: it runs, or was stopped on request, or never started."""

    managed: Managed
    handle: ProcessHandle | None = None
    pid: int = 0
    exit_code: int | None = None
    starts: int = 0
    stopping: bool = False
    log_start: int = 0  # size of the log when this life began
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is being started

    def message(self) -> keeper_pb2.Process:
        """As the wire says it."""
        phase = keeper_pb2.PROCESS_PHASE_STOPPED
        if self.handle is not None:
            phase = keeper_pb2.PROCESS_PHASE_RUNNING
        elif self.exit_code is not None:
            phase = keeper_pb2.PROCESS_PHASE_EXITED
        return keeper_pb2.Process(
            name=self.managed.spec.name,
            phase=phase,
            pid=self.pid,
            exit_code=self.exit_code or 0,
            address=self.managed.address,
            starts=self.starts,
        )

    def log_tail(self, limit_bytes: int = 4096) -> str:
        """The end of what this life has written."""
        try:
            with self.managed.spec.log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = self.log_start if self.log_start <= size else 0
                file.seek(max(begin, size - limit_bytes))
                return file.read(limit_bytes).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return ""


class Supervisor:
    """Keeps the processes. All methods belong to one event loop."""

    def __init__(
        self,
        processes: Sequence[Managed],
        launcher: Launcher,
        fleet_limits: FleetLimits = FleetLimits(),  # noqa: B008  frozen
        plan_lane: Callable[[int], Managed] | None = None,
    ) -> None:
        self.keepers = {managed.spec.name: Keeper(managed) for managed in processes}
        self._launcher = launcher
        self.version = 0  # counts changes
        self._changed = asyncio.Event()
        self._tasks = Tasks()
        self._plan_lane = plan_lane
        self._closing = False
        self._coordinator_backoff = Backoff(fleet_limits)

    async def start_all(self) -> None:
        """Start every process, and the upkeep of their logs. OSError for the first that cannot be started."""
        await asyncio.gather(*(self.start(name) for name in self.keepers))
        self._tasks.spawn(self._bound_logs())

    async def start(self, name: str) -> None:
        """Start the process unless it runs already. KeyError for an unknown name, OSError when it cannot be started."""
        keeper = self.keepers[name]
        async with keeper.lock:
            if keeper.handle is not None or self._closing:
                return
            path = keeper.managed.spec.log_path
            keeper.log_start = path.stat().st_size if path.exists() else 0
            keeper.handle = handle = await self._launcher.spawn(keeper.managed.spec)
            keeper.pid, keeper.exit_code, keeper.stopping = handle.pid, None, False
            keeper.starts += 1
        log.info("started", process=name, pid=handle.pid, starts=keeper.starts)
        self._notify()
        self._tasks.spawn(self._wait(keeper, handle))
        if keeper.managed.ping:
            self._tasks.spawn(self._see_that_it_answers(keeper, handle))

    async def stop(self, name: str, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace; returns when it is gone. KeyError for an unknown name.

        Without any grace it is a kill: the end then counts as an exit, not as a stop on request.
        """
        keeper = self.keepers[name]
        async with keeper.lock:
            handle = keeper.handle
        if handle is None:
            return
        if grace_s <= 0:
            await handle.kill()
        else:
            keeper.stopping = True
            await end(handle, grace_s)
        while keeper.handle is handle:
            await self.change(self.version)

    async def add_lane(self) -> str:
        """One more lane, its number the least above all others; its name. ValueError when there can be no more."""
        if self._plan_lane is None:
            raise ValueError("this supervisor cannot plan lanes")
        numbers = [int(name.removeprefix("lane-")) for name in self.keepers if name.startswith("lane-")]
        if len(numbers) >= LANES_MAX:
            raise ValueError(f"there are {LANES_MAX} lanes already")
        managed = self._plan_lane(max(numbers, default=-1) + 1)
        name = managed.spec.name
        self.keepers[name] = Keeper(managed)
        try:
            await self.start(name)
        except OSError:
            del self.keepers[name]
            raise
        return name

    def remove_lane(self, name: str) -> None:
        """Forget a lane that does not run. KeyError for an unknown name, ValueError when it runs or is no lane."""
        keeper = self.keepers[name]
        if not keeper.managed.address:
            raise ValueError(f"{name} is no lane")
        if keeper.handle is not None or keeper.lock.locked():
            raise ValueError(f"{name} runs")
        del self.keepers[name]
        self._notify()

    async def shutdown(self, drain_s: float) -> None:
        """Stop all: the coordinator first (it drains), then the lanes, the owner last; then the launcher."""
        self._closing = True
        names = list(self.keepers)
        lanes = [name for name in names if name not in (COORDINATOR, OWNER)]
        stops = (([COORDINATOR], drain_s), (lanes, limits.LANE_STOP_S), ([OWNER], limits.OWNER_STOP_S))
        for group, grace_s in stops:
            await asyncio.gather(*(self.stop(name, grace_s) for name in group if name in self.keepers))
        await self.close()

    async def close(self) -> None:
        """Kill what still runs and end all tasks. Idempotent."""
        self._closing = True
        await self._launcher.close()
        await self._tasks.cancel()

    def snapshot(self) -> keeper_pb2.Snapshot:
        """All processes now."""
        return keeper_pb2.Snapshot(processes=[keeper.message() for keeper in self.keepers.values()])

    async def change(self, seen: int) -> None:
        """Returns once there is a newer version than `seen`."""
        while self.version == seen:
            await self._changed.wait()

    def _notify(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, keeper: Keeper, handle: ProcessHandle) -> None:
        began = time.monotonic()
        code = await handle.wait()
        name = keeper.managed.spec.name
        keeper.handle, keeper.pid = None, 0
        keeper.exit_code = None if keeper.stopping else code
        expected = keeper.stopping or self._closing
        (log.info if expected else log.warning)("ended", process=name, exit_code=code)
        self._notify()
        life_s = time.monotonic() - began
        while name == COORDINATOR and keeper.handle is None and not keeper.stopping and not self._closing:
            await asyncio.sleep(self._coordinator_backoff.after_life_of(life_s))
            try:
                await self.start(name)
            except OSError as error:
                log.error("cannot start", process=name, reason=str(error))
                life_s = 0.0

    async def _see_that_it_answers(self, keeper: Keeper, handle: ProcessHandle) -> None:
        """Kills this life of the process when it neither ends nor answers: it was stopped, or its loop is stuck."""
        name, vigil = keeper.managed.spec.name, Vigil(time.monotonic())
        async with grpc.aio.insecure_channel(keeper.managed.ping, options=PING_OPTIONS) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            while keeper.handle is handle and not keeper.stopping and not self._closing:
                try:
                    await stub.Ping(admin_pb2.PingRequest(), timeout=limits.PING_TIMEOUT_S)
                    vigil.answered(time.monotonic())
                except grpc.aio.AioRpcError:
                    if vigil.overdue(time.monotonic()):
                        log.error("killed", process=name, reason="it does not answer")
                        await handle.kill()
                        return
                await asyncio.sleep(limits.PING_S)

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for keeper in self.keepers.values():
                try:
                    trim_log(keeper.managed.spec.log_path)
                except OSError as error:  # tried again; a full disk must not end the upkeep of the other logs
                    log.warning("cannot trim", log=str(keeper.managed.spec.log_path), reason=error.strerror)


async def end(handle: ProcessHandle, grace_s: float) -> int:
    """SIGTERM, then SIGKILL after the grace; the exit code."""
    await handle.terminate()
    try:
        return await asyncio.wait_for(handle.wait(), grace_s)
    except TimeoutError:
        await handle.kill()
        return await handle.wait()


def trim_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES, kept_bytes: int = LOG_KEPT_BYTES) -> None:
    """Cut a log that has grown past the limit: its end goes to `<name>.1`, the file begins anew.

    The process goes on writing to the same file (opened for appending), so nobody is paced by this one; lines written
    between the copy and the cut are lost.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit_bytes:
            return
        file.seek(size - kept_bytes)
        path.with_name(path.name + ".1").write_bytes(file.read(kept_bytes))
        file.truncate(0)


class KeeperService(keeper_pb2_grpc.KeepersServicer):
    """The supervisor over gRPC. The socket's directory (0700) is the access control."""

    def __init__(self, supervisor: Supervisor, owner_socket: Path | None = None) -> None:
        self._supervisor, self._owner_socket = supervisor, owner_socket

    async def Watch(
        self, request: keeper_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[keeper_pb2.Snapshot]:
        """The state now and after every change."""
        while True:
            seen = self._supervisor.version
            yield self._supervisor.snapshot()
            await self._supervisor.change(seen)

    async def Start(self, request: keeper_pb2.ProcessName, context: grpc.aio.ServicerContext) -> keeper_pb2.StartReply:
        """Start a process."""
        try:
            await self._supervisor.start(request.name)
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no process {request.name!r}")
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{request.name}: {error}")
        return keeper_pb2.StartReply()

    async def Stop(self, request: keeper_pb2.StopRequest, context: grpc.aio.ServicerContext) -> keeper_pb2.StopReply:
        """Stop a process: a request to stop, not a crash."""
        try:
            await self._supervisor.stop(request.name, min(max(request.grace_s, 0.0), limits.STOP_GRACE_MAX_S))
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no process {request.name!r}")
        return keeper_pb2.StopReply()

    async def AddLane(
        self, request: keeper_pb2.AddLaneRequest, context: grpc.aio.ServicerContext
    ) -> keeper_pb2.ProcessName:
        """Plan and start one more lane."""
        try:
            return keeper_pb2.ProcessName(name=await self._supervisor.add_lane())
        except (ValueError, CoordinatorError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort always raises")

    async def RemoveLane(
        self, request: keeper_pb2.ProcessName, context: grpc.aio.ServicerContext
    ) -> keeper_pb2.RemoveLaneReply:
        """Forget a lane."""
        try:
            self._supervisor.remove_lane(request.name)
        except KeyError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no process {request.name!r}")
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return keeper_pb2.RemoveLaneReply()

    async def Region(
        self, request: keeper_pb2.RegionRequest, context: grpc.aio.ServicerContext
    ) -> keeper_pb2.RegionReply:
        """How far the owner is."""
        status = await asyncio.to_thread(ask_owner, self._owner_socket) if self._owner_socket else None
        if status is None:
            return keeper_pb2.RegionReply()
        return keeper_pb2.RegionReply(
            state=status.state,
            done_bytes=status.done_bytes,
            total_bytes=status.total_bytes,
            source=status.source,
            fingerprint=status.fingerprint,
            generation=status.generation,
        )


async def serve_keepers(supervisor: Supervisor, socket: Path, owner_socket: Path | None = None) -> grpc.aio.Server:
    """Serve the keepers on this socket, 0600. `owner_socket`: of the owner whom callers may ask about."""
    server = grpc.aio.server()
    keeper_pb2_grpc.add_KeepersServicer_to_server(KeeperService(supervisor, owner_socket), server)
    server.add_insecure_port(f"unix:{socket}")
    await start_server(server)
    os.chmod(socket, 0o600)
    return server
