"""The launcher seam: a process described as plain data becomes a running process that can be waited for.

Not here: when a process starts again (fleet and supervisor), or what its arguments mean (plan).

Invariant: a process started through a launcher never outlives the process that holds the launcher, even when that one
is killed with SIGKILL; it runs in a session of its own with SIGINT ignored, so a Ctrl-C in the terminal reaches only
the supervisor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start: everything a launcher on any host needs, and nothing it has to understand."""

    name: str  # "owner", "lane-0", "coordinator"
    argv: tuple[str, ...]
    env: Mapping[str, str]  # the whole environment, not additions
    log_path: Path  # stdout and stderr are appended here
    cores: tuple[int, ...] = ()  # empty: the launcher's own cores

    def __post_init__(self) -> None:
        assert self.argv, "a process has a program"


class ProcessHandle(Protocol):
    """A running process. Signals to a process that has ended do nothing."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

    async def wait(self) -> int:
        """Exit code, or the negative number of the signal that killed it. May be awaited by several."""

    async def terminate(self) -> None:
        """SIGTERM to the process."""

    async def kill(self) -> None:
        """SIGKILL to the process and whatever it started in its session."""


class Launcher(Protocol):
    """Starts processes. `close` kills what is still running and gives back everything the launcher set up."""

    async def spawn(self, spec: ProcessSpec) -> ProcessHandle:
        """Start the process; returns once it has a pid. OSError when it cannot be started."""

    async def close(self) -> None:
        """Idempotent."""


def module_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line of one of our own modules, by this interpreter; -P keeps the working directory off the path."""
    return (sys.executable, "-P", "-m", module, *arguments)


def shim_argv(spec: ProcessSpec) -> list[str]:
    """The command line that really is started: `exec.py` ties the process to its parent, then becomes `spec.argv`."""
    cores = ",".join(map(str, spec.cores))
    return [*module_argv("coordinator.launchers.exec", str(os.getpid()), cores, "--"), *spec.argv]
