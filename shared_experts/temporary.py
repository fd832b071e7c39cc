"""A directory to write into before its name is taken: locked while its writer lives, so that leftovers can be told.

Not here: what is written, or the rename. Invariant: only directories whose writer is dead are ever swept away.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from pathlib import Path


class TemporarySibling:
    """A locked directory beside the target; gone on exit unless it was renamed."""

    def __init__(self, target: Path) -> None:
        self._parent, self._prefix = target.absolute().parent, f".{target.name}.partial-"

    def __enter__(self) -> Path:
        for old in self._parent.glob(f"{glob.escape(self._prefix)}*"):
            _sweep(old)
        self._folder = self._parent / f"{self._prefix}{secrets.token_hex(8)}"
        self._folder.mkdir()
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def _sweep(folder: Path) -> None:
    """Removes what a killed conversion left; a living one holds the lock."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
