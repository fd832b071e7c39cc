"""Where the owners of one user's clusters on this host meet, so that one pack is in memory once.

    regions/                                 0700, shared by all clusters of this user
        <fingerprint>.lock                   flock held by the owner that is adopting or building this pack's region
        <fingerprint>.<16 hex>               symbolic link to a run directory whose owner or lanes may hold the region

Not here: asking holders and proving what they lend (owner.py). Invariants: links are made and dead ones removed only
under the lock, so whoever holds it sees every holder that there is; a process that dies frees the lock, and a link
that it left leads to sockets where nobody answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from pathlib import Path

from shared_experts.errors import RegionError
from shared_experts.handoff import ask

OWNER_SOCKET = "owner.sock"
LANE_SOCKETS = "lane-*.region.sock"
_ANSWER_LIMIT_S = 0.5
CLUSTERS_MAX = 64  # links looked at; more clusters with one pack on one host is somebody's mistake


class Rendezvous:
    """One owner's view of the meeting place of its pack. The folder must be one that is ours alone."""

    def __init__(self, folder: Path, fingerprint: bytes, run_dir: Path) -> None:
        self._folder, self._run_dir = folder, run_dir.resolve()
        self._prefix = fingerprint.hex()
        self._lock_path = folder / f"{self._prefix}.lock"
        key = hashlib.sha256(os.fsencode(self._run_dir)).hexdigest()[:16]
        self._link = folder / f"{self._prefix}.{key}"

    def try_lock(self) -> int | None:
        """A descriptor that holds the lock until it is closed; None while another owner holds it."""
        while True:
            try:
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise RegionError(f"{self._lock_path}: cannot be opened: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            # The last owner to leave removes the file while it holds it: one opened before that locks nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._lock_path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)

    def join(self) -> None:
        """Makes this owner's link. Under the lock."""
        with contextlib.suppress(FileNotFoundError):
            self._link.unlink()
        try:
            self._link.symlink_to(self._run_dir)
        except OSError as error:
            raise RegionError(f"{self._link}: cannot be made: {error.strerror}") from error

    def others(self) -> list[Path]:
        """The run directories of other clusters with this pack, safe ones only."""
        return [target for link in self._links() if link != self._link and (target := _target(link)) is not None]

    def sweep(self) -> None:
        """Removes links whose run directory is gone. Under the lock."""
        for link in self._links():
            if not os.path.exists(link):
                with contextlib.suppress(FileNotFoundError):
                    link.unlink()

    def leave(self) -> None:
        """Removes what this owner made, as far as nobody needs it: lanes that live on stay to be found."""
        if any(_answers(socket) for socket in self._run_dir.glob(LANE_SOCKETS)):
            return
        with contextlib.suppress(OSError, RegionError):
            self._link.unlink(missing_ok=True)
            lock = self.try_lock()
            if lock is None:
                return
            try:
                self.sweep()
                if not self._links():
                    self._lock_path.unlink()
            finally:
                os.close(lock)

    def _links(self) -> list[Path]:
        links = sorted(self._folder.glob(f"{self._prefix}.*"))
        return [link for link in links if link != self._lock_path][:CLUSTERS_MAX]


def _answers(socket: Path) -> bool:
    try:
        ask(socket, "status", timeout_s=_ANSWER_LIMIT_S)
    except RegionError:
        return False
    return True


def _target(link: Path) -> Path | None:
    """The run directory behind a link when it is a directory of ours that nobody else can enter."""
    try:
        target = link.readlink()
        found = os.lstat(target)
    except OSError:
        return None
    if not target.is_absolute() or not stat.S_ISDIR(found.st_mode):
        return None
    return target if found.st_uid == os.geteuid() and not found.st_mode & 0o077 else None
