"""A thread with a Unix socket that lends a descriptor; the owner runs one, and so does every lane with its copy.

One loop over a selector: one request and one reply per connection, nothing ever blocks, at most 32 connections (the
oldest gives way) and 5 s for each. It reads a socket's bytes without room for descriptors, so a client cannot put any
into this process. Not here: the words (handoff.py), what is lent (the `answer` callback).
Invariant: no client's bytes, silence or death stop the loop; the socket has mode 0600 from its first moment, and a name
that another living server holds is never taken.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from types import TracebackType

import structlog

from shared_experts.errors import HandoffError, RegionBusy, RegionError
from shared_experts.handoff import (
    MESSAGE_MAX_BYTES,
    RegionStatus,
    check_socket_path,
    decode_request,
    encode_refusal,
    encode_status,
    peer_uid,
)

CONNECTIONS_MAX = 32
CONNECTION_LIMIT_S = 5.0

Answer = Callable[[], tuple[RegionStatus, int | None]]

_log = structlog.get_logger(__name__)


class DescriptorServer:
    """Serves `answer()` on `path` from `start` to `close`; the descriptor stays the caller's and must outlive it.

    Used as a context manager it starts and closes itself. `start` raises RegionBusy or RegionError.
    """

    def __init__(self, path: str | os.PathLike[str], answer: Answer) -> None:
        self.path = check_socket_path(path)
        self._answer = answer
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1
        self._inode = (0, 0)

    def start(self) -> None:
        """Takes the name and answers from now on."""
        listener, self._inode = listen(self.path)
        self._listener = listener
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="descriptor-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the name if it is still ours. Safe to call twice."""
        if self._thread is None or self._listener is None:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._thread = None
        self._listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        remove(self.path, self._inode)

    def __enter__(self) -> DescriptorServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, listener: socket.socket) -> None:
        open_since: dict[socket.socket, float] = {}  # insertion order is age
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)

            def drop(connection: socket.socket) -> None:
                del open_since[connection]
                selector.unregister(connection)
                connection.close()

            while True:
                events = selector.select(timeout=CONNECTION_LIMIT_S / 5 if open_since else None)
                for key, _ in events:
                    if key.fileobj == self._wake_read:
                        for connection in list(open_since):
                            drop(connection)
                        return
                    if key.fileobj is listener:
                        accepted = accept(listener)
                        if accepted is not None:
                            if len(open_since) >= CONNECTIONS_MAX:
                                drop(next(iter(open_since)))
                            open_since[accepted] = time.monotonic()
                            selector.register(accepted, selectors.EVENT_READ)
                    elif key.fileobj in open_since:  # not dropped a moment ago for its age
                        connection = key.fileobj
                        assert isinstance(connection, socket.socket)
                        self._reply(connection)
                        drop(connection)
                oldest_s = time.monotonic() - CONNECTION_LIMIT_S
                for connection in [c for c, since_s in open_since.items() if since_s < oldest_s]:
                    drop(connection)

    def _reply(self, connection: socket.socket) -> None:
        fds: list[int] = []
        try:
            message = connection.recv(MESSAGE_MAX_BYTES + 1)  # no room for descriptors: the kernel drops any
            if not message:
                return
            want = decode_request(message)
            status, fd = self._answer()
            if want == "descriptor" and fd is not None:
                fds.append(fd)
            reply = encode_status(status)
        except HandoffError as error:
            _log.warning("handoff_refused", reason=str(error))
            reply = encode_refusal(str(error))
        except OSError:
            return
        except Exception:
            _log.exception("handoff_answer_failed")
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(OSError):  # the client is gone or does not read
            connection.sendmsg([reply], rights)


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
        listener.listen(4 * CONNECTIONS_MAX)
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
