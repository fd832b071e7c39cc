"""A thread of this process that stands still where it is, as if its core were gone: what a watchdog must notice.

Not here: what is lost by it. Invariant: after `thaw` it goes on as if nothing had been.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

NAME = "expert-share"  # of the thread that answers a GPU lane's doorbell


def threads(name: str = NAME) -> set[int]:
    """Those of this process that have the name."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == name:
                found.add(int(task.name))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


class Frozen:
    """A thread, stopped by a signal whose handler waits for another one; `thaw` lets it go on."""

    def __init__(self, others: Collection[int] = (), name: str = NAME) -> None:
        """The one of that name that is none of `others`, the `threads` that there were before it began."""
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal.restype = ctypes.c_void_p
        self._libc = libc
        found, until = set[int](), time.monotonic() + 60
        while not found:  # it names itself
            assert time.monotonic() < until, f"no thread is named {name}"
            found = threads(name).difference(others)
        assert len(found) == 1, f"threads {sorted(found)} are named {name}: which one? Somebody left a share open"
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
