"""The warden of a Ray: waits until its supervisor is gone, then ends every process of that Ray and removes its files.

    python -m coordinator.launchers.ray_warden DIRECTORY      stdin: a pipe that the supervisor holds open

Ray's daemons end by themselves when their driver is killed, but not all of them and not soon: two agents were still
there 48 s later (Ray 2.60). Every process of this Ray, whoever its parent is by now, has a log file in DIRECTORY open;
an environment variable would not do, because they write their titles over their environment.

Invariant: only processes of this user with an open file in DIRECTORY are killed, and never the supervisor; only a
directory with the prefix is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PREFIX = "exw-ray-"
LIMIT_S = 10.0


def main(directory: Path) -> None:
    """Wait for the end of stdin, then clean up."""
    supervisor = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + LIMIT_S
    while (found := users_of(directory) - {os.getpid(), supervisor}) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if directory.name.startswith(PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def users_of(directory: Path) -> set[int]:
    """Processes that have a file below the directory open."""
    prefix = f"{directory}/"
    found = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            for link in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(link).startswith(prefix):
                        found.add(int(process.name))
                        break
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
