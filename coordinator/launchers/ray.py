"""Launcher through Ray: a local Ray whose detached named actors, the keepers, start and watch the processes.

    supervisor ── Ray calls ──▶ keeper actor, one per process ── fork, shim ──▶ owner, lane, coordinator
        └── pipe ──▶ warden: when the pipe closes, it ends every process of this Ray and removes its directory

Ray is the process manager, not the data plane: no token passes through it. The only file that imports Ray. Not here:
restarts, and the start of the process itself (`local`, which also works inside the keeper).

Invariant: nothing of this Ray listens on anything but loopback, every call needs a token that only this user can read,
and nothing of it is left when the supervisor is gone, however that went.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import secrets
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from coordinator.errors import Interrupted, LauncherError
from coordinator.host.rundir import RunDir
from coordinator.launchers import ray_warden
from coordinator.launchers.base import ProcessSpec, module_argv
from coordinator.launchers.local import LocalLauncher, LocalProcess

LOWEST_VERSION = (2, 59, 1)  # earlier ones have known remote-execution holes
OBJECT_STORE_BYTES = 200_000_000  # nothing is stored in it, but Ray wants about 80 MB at least
NAMESPACE = "expressway"
KILL_TIMEOUT_S = 5.0


class KeeperActor:
    """Runs inside a Ray worker: the parent of one process."""

    def __init__(self) -> None:
        self._launcher = LocalLauncher()
        self._processes: dict[int, LocalProcess] = {}

    async def spawn(
        self, name: str, argv: tuple[str, ...], env: dict[str, str], log: str, cores: tuple[int, ...]
    ) -> int:
        """Start the process; its pid. Called on the actor's one event-loop thread, which lives as long as the actor."""
        process = await self._launcher.spawn(ProcessSpec(name, argv, env, Path(log), cores))
        self._processes[process.pid] = process
        return process.pid

    async def wait(self, pid: int) -> int:
        """Exit code of the process, once it has ended."""
        return await self._processes[pid].wait()

    async def signal(self, pid: int, number: int) -> None:
        """SIGTERM to the process, or SIGKILL to its session."""
        process = self._processes[pid]
        await (process.kill() if number == signal.SIGKILL else process.terminate())


class RayProcess:
    """A process below a keeper actor."""

    def __init__(self, ray: Any, keeper: Any, pid: int) -> None:
        self._ray, self._keeper, self._pid = ray, keeper, pid
        self.exited = asyncio.ensure_future(self._watch())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._pid

    async def wait(self) -> int:
        """Exit code; -9 when the keeper died, because the process is killed with it."""
        return await asyncio.shield(self.exited)

    async def terminate(self) -> None:
        """SIGTERM to the process."""
        await self._signal(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL to the process and its session's processes."""
        await self._signal(signal.SIGKILL)

    async def _watch(self) -> int:
        try:
            return int(await self._keeper.wait.remote(self._pid))
        except self._ray.exceptions.RayError:
            return -signal.SIGKILL

    async def _signal(self, number: int) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # the keeper is gone, and the process with it
            await self._keeper.signal.remote(self._pid, number)


class RayLauncher:
    """Starts a Ray of its own on this host; blocks for some seconds while that comes up."""

    def __init__(self, run_dir: RunDir) -> None:
        _check_version()
        # Ray's socket paths add 62 bytes to its directory, so it needs a shorter one than the run directory may be
        directory = Path(tempfile.mkdtemp(prefix=ray_warden.PREFIX, dir="/tmp"))
        token = run_dir.path / "ray.token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self._warden = _start_warden(directory)
        try:
            _set_environment(token)
            self._ray = _start_ray(directory)
        except BaseException:
            _dismiss(self._warden)
            raise
        self._keepers: dict[str, Any] = {}
        self._processes: set[RayProcess] = set()

    async def spawn(self, spec: ProcessSpec) -> RayProcess:
        """Start the process in its keeper; OSError when Ray cannot."""
        for attempt in (1, 2):
            keeper = self._keepers.get(spec.name) or self._new_keeper(spec.name)
            try:
                pid = await keeper.spawn.remote(spec.name, spec.argv, dict(spec.env), str(spec.log_path), spec.cores)
                break
            except self._ray.exceptions.RayActorError as error:  # the keeper of the life before died: a new one
                self._keepers.pop(spec.name, None)
                if attempt == 2:
                    raise OSError(f"its keeper cannot be started: {error}") from None
            except self._ray.exceptions.RayError as error:
                raise OSError(str(error)) from None
        process = RayProcess(self._ray, keeper, pid)
        self._processes.add(process)
        process.exited.add_done_callback(lambda _: self._processes.discard(process))
        return process

    async def close(self) -> None:
        """Kill what still runs, end Ray, and wait until the warden has seen the last of it go."""
        if self._warden.returncode is not None:
            return
        processes = tuple(self._processes)
        with contextlib.suppress(TimeoutError):  # what does not answer is killed below, with its keeper
            await asyncio.wait_for(asyncio.gather(*(process.kill() for process in processes)), KILL_TIMEOUT_S)
            await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), KILL_TIMEOUT_S)
        for process in processes:
            process.exited.cancel()
        self._ray.shutdown()
        await asyncio.to_thread(_dismiss, self._warden)

    def _new_keeper(self, name: str) -> Any:
        keeper = self._keepers[name] = (
            self._ray.remote(KeeperActor)
            .options(
                name=f"keeper-{name}-{secrets.token_hex(4)}",  # a dead keeper's name is free only some time later
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,  # restarts are the fleet's decision
                max_task_retries=0,
            )
            .remote()
        )
        return keeper


def _check_version() -> None:
    try:
        text = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise LauncherError("Ray is not installed; use --launcher local") from None
    version = tuple(int(part) for part in text.split(".")[:3] if part.isdigit())
    if version < LOWEST_VERSION:
        raise LauncherError(
            f"Ray {text} has known security holes; {'.'.join(map(str, LOWEST_VERSION))} or later is needed"
        )


def _start_warden(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_argv("coordinator.launchers.ray_warden", str(directory)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C or a closed terminal is not for it
    )


def _dismiss(warden: subprocess.Popen[bytes]) -> None:
    """Let the warden do its work, and wait for it: it is bounded."""
    assert warden.stdin is not None
    warden.stdin.close()
    warden.wait()


def _set_environment(token: Path) -> None:
    """Settings that Ray reads from the environment when it is imported, and that its daemons inherit."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]  # another cluster's address or token must not reach this one
    os.environ.update({
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # counts a shared-memory region as memory used by the lanes and kills them for it
        "RAY_memory_monitor_refresh_ms": "0",
        # its name says something else, but this is what makes Ray bind every port to 127.0.0.1 on Linux too
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    })  # fmt: skip


def _start_ray(directory: Path) -> Any:
    import ray  # after the environment was set: Ray reads it here

    try:
        ray.init(
            address="local",
            num_cpus=1,
            num_gpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            namespace=NAMESPACE,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory),
        )
    except SystemExit:  # Ray's own answer to SIGTERM
        raise Interrupted("stopped before it was ready", signal.SIGTERM) from None
    except Exception as error:  # Ray raises many unrelated types here, and each means that there is no Ray
        raise LauncherError(f"Ray does not start: {error}") from error
    return ray
