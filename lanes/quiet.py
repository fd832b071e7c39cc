"""Lanes of a host measure themselves by turns, at their start: beside another one's measuring, each finds other rates.

The lock is that of the directory where their sockets lie: nothing to create, and the kernel gives it back whatever
becomes of its holder. Who has waited long enough measures all the same: a rate that is off a little costs less than a
lane that does not come. Not here: what is measured; a lane that already serves, whose load nobody waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lanes import limits

_POLL_S = 0.02


@contextlib.contextmanager
def quiet(
    folder: Path, limit_s: float = limits.MEASURING_WAIT_S, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:  # fmt: skip
    """Until the block ends nobody else is in such a block for this directory; False where that was not to be had."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = clock() + limit_s
        while (alone := _locked(lock)) is None and clock() < until_s:
            sleep(_POLL_S)
        yield bool(alone)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for children that inherited it
        os.close(lock)


def _locked(lock: int) -> bool | None:
    """None: somebody has it. False: this file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True
