"""Runs between fork and the real program: `python -m coordinator.launchers.exec PARENT_PID CORES -- ARGV…`.

Ties the process to its parent (SIGKILL when the parent dies), ignores SIGINT, sets cores and umask, then becomes ARGV.
A program of its own because code between fork and exec in a process with threads is not safe in Python.

Invariant: ARGV runs only while PARENT_PID is alive: the parent is checked after the death signal was asked for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Prepare this process and replace it; returns only by an exception or exit."""
    parent_pid, cores, separator, *argv = arguments
    if separator != "--" or not argv:
        sys.exit("usage: exec PARENT_PID CORES -- ARGV...")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent_pid):
        sys.exit("the parent is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and an ignored signal would be inherited
    os.umask(0o077)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(argv[0], argv)  # noqa: S606  a fixed argument list, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
