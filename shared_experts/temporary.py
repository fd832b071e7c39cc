"""The directory a conversion writes into before its target's name is taken: locked by its writer, kept when that dies.

`.OUT.partial/` beside the target OUT, with two entries: `pack/`, which is renamed to OUT when it is whole, and the
journal of finished sections. Not here: what is written. Invariant: whoever holds a `PartialFolder` is the only one that
writes there, and nobody else could have put anything into it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from shared_experts.errors import ConversionBusy, NoSpace, OutputExists, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartialFolder:
    """The locked directory of one target; use it as a context. It stays on exit unless `discard` was called."""

    def __init__(self, target: Path) -> None:
        self.path = target.absolute().parent / f".{target.name}.partial"
        self.pack, self.journal = self.path / "pack", self.path / "journal"
        self._lock = -1

    def __enter__(self) -> PartialFolder:
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another conversion discarded it just now
            except OSError as error:
                raise OutputExists(f"{self.path}: is in the way of a conversion ({error.strerror})") from None
            try:
                if self._take(lock):
                    self._lock = lock
                    return self
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _take(self, lock: int) -> bool:
        """Locks; False where the directory was replaced meanwhile."""
        status = os.fstat(lock)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise OutputExists(f"{self.path}: is not a directory that only this user can write to; remove it")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConversionBusy(f"{self.path}: another conversion to this target is running") from None
        try:
            return os.path.samestat(os.lstat(self.path), status)
        except FileNotFoundError:
            return False

    def clear(self) -> None:
        """Removes what an earlier conversion left."""
        shutil.rmtree(self.pack, ignore_errors=True)
        self.journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes the directory itself."""
        self.clear()
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def refusing(what: object) -> Iterator[None]:
    """An OSError inside becomes NoSpace or StorageError, said of `what`."""
    try:
        yield
    except OSError as error:
        refusal = NoSpace if error.errno in _FULL else StorageError
        raise refusal(f"{what}: cannot be written: {error.strerror}; finished sections are kept") from None


def sync_folder(folder: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
