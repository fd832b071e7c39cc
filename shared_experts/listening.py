"""A thread that serves a Unix socket for as long as it lives: the name, the wake pipe and the end are here once.

Not here: what it does with clients (descriptor_server, park_server). Invariant: the socket has mode 0600 from its first
moment, and a name that another living server holds is never taken.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import structlog

from shared_experts.errors import RegionBusy, RegionError
from shared_experts.handoff import check_socket_path, peer_uid

BACKLOG = 128
STOP = b"x"  # on the wake pipe

_log = structlog.get_logger(__name__)


class ListeningThread(ABC):
    """Serves `path` from `start` to `close`; a context manager does both. `_serve` runs until it reads STOP from
    `_wake_read`, and has closed its clients then."""

    _listener: socket.socket
    _wake_read: int
    _wake_write: int

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.path = check_socket_path(path)
        self._name = name
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _serve(self) -> None: ...

    def start(self) -> None:
        """Takes the name and answers from now on. Raises RegionBusy or RegionError."""
        self._listener, self._inode = listen(self.path)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the name if it is still ours. Safe to call twice."""
        if self._thread is None:
            return
        self._wake(STOP)
        self._thread.join()
        self._thread = None
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        remove(self.path, self._inode)

    def _wake(self, word: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of the same
            os.write(self._wake_write, word)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listen(path: str) -> tuple[socket.socket, tuple[int, int]]:
    """A listening socket of mode 0600 under that name, and the name's device and inode. Raises RegionBusy where a
    living process holds the name, RegionError where it cannot be taken."""
    _refuse_living(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    scratch = check_socket_path(f"{path}.{os.getpid()}")
    try:
        # The mode of the socket's inode is what bind gives the name (less the umask): never a moment wider.
        os.fchmod(listener.fileno(), 0o600)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
        listener.bind(scratch)
        listener.listen(BACKLOG)
        status = os.stat(scratch)
        os.rename(scratch, path)  # replaces a dead server's name in one step
    except OSError as error:
        listener.close()
        raise RegionError(f"{path}: cannot listen: {error.strerror}") from error
    return listener, (status.st_dev, status.st_ino)


def remove(path: str, inode: tuple[int, int]) -> None:
    """Removes the name if it is still ours."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if (status.st_dev, status.st_ino) == inode:
            os.unlink(path)


def accept(listener: socket.socket) -> socket.socket | None:
    """A client of this user, not blocking; None where there is none."""
    try:
        connection, _ = listener.accept()
    except OSError as error:  # the client is gone, or this process is out of descriptors
        if not isinstance(error, BlockingIOError):
            time.sleep(0.01)
        return None
    connection.setblocking(False)
    if peer_uid(connection) != os.geteuid():
        _log.warning("handoff_foreign_user", uid=peer_uid(connection))
        connection.close()
        return None
    return connection


def _refuse_living(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise RegionError(f"{path}: something that is not a socket has this name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return  # no name, or a dead process's
        except OSError as error:
            raise RegionBusy(f"{path}: something that is no region server holds this name: {error.strerror}") from error
        raise RegionBusy(f"{path}: a living process serves here")
