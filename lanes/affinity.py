"""Where the threads of a lane's process may run that compute nothing, and how they give way to those that do.

The share's pool spins on its cores while windows run: a thread that wakes up there takes a core from a worker in the
middle of a layer, and every layer ends with its slowest worker. Not here: which cores a lane has (config), who pins
itself to compute (the native pool, the engine).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

NICE = 10  # of a thread that has time


def gather(core: int) -> None:
    """Puts every thread of this process that is not on a single core yet on `core`; what they start later follows.

    The calling thread is left as it is.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if thread != threading.get_native_id() and len(os.sched_getaffinity(thread)) > 1:
                os.sched_setaffinity(thread, {core})


def keep_to(cores: Iterable[int]) -> None:
    """Puts the calling thread on these cores, as far as they are there; without any it stays where it is."""
    with contextlib.suppress(OSError):  # none of them, or taken away meanwhile
        os.sched_setaffinity(0, cores)


def step_back() -> None:
    """The calling thread gets what computing leaves."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
