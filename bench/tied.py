"""Processes that a bench or a check starts end with it, however it ends: a lane left over spins on cores that the next
measurement uses.

    python -m bench.tied PARENT_PID ARGV...        what `argv` makes; becomes ARGV

A program of its own because code between fork and exec in a process with threads is not safe in Python. Not here: an
orderly end, which whoever starts a process sees to. Invariant: ARGV runs only while its parent's thread that started it
is alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def argv(*words: str) -> list[str]:
    """The command that runs `python` with these words as a child of this process, and only so long."""
    return [sys.executable, "-m", "bench.tied", str(os.getpid()), sys.executable, *words]


def main(words: Sequence[str]) -> None:
    """Becomes the program; returns only by an exception or exit."""
    parent, *program = words
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
    os.execvp(program[0], program)  # noqa: S606 - a fixed argument list, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
