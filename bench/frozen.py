"""A thread of this process that stands still where it is, as if its core were gone: what a watchdog must notice.

Not here: what is lost by it. Invariant: after `thaw` it goes on as if nothing had been.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path


class Frozen:
    """The coordinator's thread, stopped by a signal whose handler waits for another one; `thaw` lets it go on."""

    def __init__(self, name: str = "expert-share") -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        self._libc = libc
        found, until = list[int](), time.monotonic() + 60
        while not found:  # it names itself
            assert time.monotonic() < until, f"no thread is named {name}"
            tasks = Path("/proc/self/task").iterdir()
            found = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name]
        (self.thread,) = found
        libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
        libc.signal(signal.SIGUSR2, ctypes.cast(libc.getpid, ctypes.c_void_p))  # a handler that returns
        self._send(signal.SIGUSR1)

    def thaw(self) -> None:
        """It runs again."""
        self._send(signal.SIGUSR2)
        self._libc.signal(signal.SIGUSR1, None)  # its default again

    def _send(self, number: int) -> None:
        assert self._libc.tgkill(os.getpid(), self.thread, number) == 0
