"""Launcher for this host: plain child processes, without Ray.

Not here: restarts. Invariant: every child was started by the thread that runs the event loop (the kernel ties the
parent-death signal to the starting thread, so a helper thread that ends would take its children along).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from coordinator.launchers.base import ProcessSpec, shim_argv


class LocalProcess:
    """A child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Exit code, or the negative number of the signal that killed it."""
        return await self._process.wait()

    async def terminate(self) -> None:
        """SIGTERM to the process."""
        self._signal(signal.SIGTERM, group=False)

    async def kill(self) -> None:
        """SIGKILL to the process and its session's processes."""
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        if self._process.returncode is not None:
            return  # reaped: the number may belong to somebody else by now
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)


class LocalLauncher:
    """Starts children of this process."""

    def __init__(self) -> None:
        self._running: set[LocalProcess] = set()
        self._reapers: set[asyncio.Task[None]] = set()

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        """Start the process; returns once it has a pid."""
        log = os.open(spec.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            child = await asyncio.create_subprocess_exec(
                *shim_argv(spec),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(spec.env),
                start_new_session=True,
            )
        finally:
            os.close(log)
        process = LocalProcess(child)
        self._running.add(process)
        reaper = asyncio.create_task(self._reap(process))
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)
        return process

    async def close(self) -> None:
        """Kill what still runs and wait until it is gone."""
        for process in tuple(self._running):
            await process.kill()
        if self._reapers:
            await asyncio.wait(self._reapers)

    async def _reap(self, process: LocalProcess) -> None:
        await process.wait()
        self._running.discard(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind in its session
