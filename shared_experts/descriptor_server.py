"""A thread with a Unix socket that lends a descriptor; the owner runs one, and so does every lane with its copy.

One loop over a selector: one request and one reply per connection, nothing ever blocks, at most 32 connections (the
oldest gives way) and 5 s for each. It reads a socket's bytes without room for descriptors, so a client cannot put any
into this process. Not here: the words (handoff.py), what is lent (the `answer` callback), the thread's life
(listening.py). Invariant: no client's bytes, silence or death stop the loop.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

import structlog

from shared_experts.errors import HandoffError
from shared_experts.handoff import (
    MESSAGE_MAX_BYTES,
    RegionStatus,
    decode_request,
    encode_refusal,
    encode_status,
)
from shared_experts.listening import ListeningThread, accept

CONNECTIONS_MAX = 32
CONNECTION_LIMIT_S = 5.0

Answer = Callable[[], tuple[RegionStatus, int | None]]

_log = structlog.get_logger(__name__)


class DescriptorServer(ListeningThread):
    """Serves `answer()`; the descriptor stays the caller's and must outlive it."""

    def __init__(self, path: str | os.PathLike[str], answer: Answer) -> None:
        super().__init__(path, "descriptor-server")
        self._answer = answer

    def _serve(self) -> None:
        listener = self._listener
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
