"""Which cores the threads of a lane's process may use, once all of them that compute are pinned.

The share's pool spins on its cores while windows run: a thread that wakes up there takes a core from a worker in the
middle of a layer, and every layer ends with its slowest worker. Not here: which cores a lane has (config), who pins
itself (the native pool, the engine).
"""

from __future__ import annotations

import contextlib
import os
import threading


def gather(core: int) -> None:
    """Puts every thread of this process that is not on a single core yet on `core`; what they start later follows.

    The calling thread is left as it is.
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if thread != threading.get_native_id() and len(os.sched_getaffinity(thread)) > 1:
                os.sched_setaffinity(thread, {core})
