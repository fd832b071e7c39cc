"""The owner's thread for the park pool: leases, publishes, pins and tells, one message at a time.

A connection is a lane's life: what it leased or pinned is free again when it ends, however it ends. Nothing waits for a
lane: a reply that does not fit its socket ends the connection. Not here: which conversation goes (park_index), the
words (park_messages), the bytes of conversations (lanes write and read them themselves).

Invariants: no client's bytes, silence or death stop the loop; a segment is zeroed before another tenant's lane gets it;
the pool takes no memory that the host's floor needs.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import time

import structlog

from shared_experts import host_memory, limits
from shared_experts import park_messages as words
from shared_experts.errors import ParkError, ParkRefused
from shared_experts.listening import STOP, ListeningThread, accept
from shared_experts.park_disk import ParkDisk
from shared_experts.park_index import Entry, Mark, ParkIndex
from shared_experts.park_keeper import ParkKeeper
from shared_experts.park_memory import HUGE_PAGE_BYTES, ParkMemory

SOCKET_NAME = "park.sock"
_RELIEF_S = 5.0
_ROOM_S = 0.02  # a conversation's messages follow one another: files of the kernel are read for the first of them

_log = structlog.get_logger(__name__)


def fitting_bytes() -> int:
    """Of a pool whose size nobody told: a share of what is free now, but the least; huge pages where as many are left.

    It is taken as it fills and given back when the host is short of it, but a lane that starts meanwhile needs room.
    """
    huge_bytes = host_memory.free_huge_pages() * HUGE_PAGE_BYTES
    spare_bytes = (host_memory.available_bytes() - host_memory.floor_bytes()) // limits.PARK_SHARE
    wanted = huge_bytes if huge_bytes >= limits.PARK_LEAST_BYTES else max(limits.PARK_LEAST_BYTES, spare_bytes)
    return min(wanted, limits.PARK_POOL_BYTES) // limits.PARK_SEGMENT_BYTES * limits.PARK_SEGMENT_BYTES


class ParkServer(ListeningThread):
    """Serves a pool of `total_bytes` on `path` from `start` to `close`; a context manager does both."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        total_bytes: int,
        *,
        segment_bytes: int = limits.PARK_SEGMENT_BYTES,
        disk: ParkDisk | None = None,
    ) -> None:
        super().__init__(path, "park-server")
        self.generation = os.urandom(words.ID_BYTES)
        self._total_bytes, self._segment_bytes, self._disk = total_bytes, segment_bytes, disk
        self._last_tenant: dict[int, bytes] = {}  # of every segment that was ever leased
        self._looked_s = 0.0  # at the host's memory
        self._room_s, self._room_until = -1.0, 0  # when it was counted, and up to which segment there was some
        self._punches = 0

    def start(self) -> None:
        """Makes the pool, takes the name and answers from now on. Raises RegionError or RegionBusy."""
        self._memory = ParkMemory.create(self._total_bytes, self._segment_bytes)
        self.index = ParkIndex(self._memory.segments, self._segment_bytes)
        try:
            super().start()
        except BaseException:
            self._memory.close()
            raise

    def close(self) -> None:
        """Stops answering, removes the name if it is still ours and gives the pool up. Safe to call twice."""
        if self._thread is not None:
            super().close()
            self._memory.close()

    def _serve(self) -> None:
        keeper = None
        if self._disk is not None:
            keeper = ParkKeeper(self._disk, self.index, self._memory, lambda: self._wake(b"d"))
            loaded = keeper.load()  # lanes do without the pool meanwhile
            _log.info("park_loaded", conversations=loaded)
        try:
            self._loop(keeper)
        finally:
            if keeper is not None:
                keeper.close()

    def _loop(self, keeper: ParkKeeper | None) -> None:
        clients: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=_RELIEF_S):
                    if key.fileobj == self._wake_read:
                        if STOP not in os.read(self._wake_read, 64):
                            continue
                        for client in clients:
                            client.close()
                        return
                    if key.fileobj is self._listener:
                        accepted = accept(self._listener)
                        if accepted is not None and len(clients) >= limits.PARK_CONNECTIONS:
                            accepted.close()
                        elif accepted is not None:
                            clients.add(accepted)
                            selector.register(accepted, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket) and not self._answer(key.fileobj):
                        selector.unregister(key.fileobj)
                        clients.discard(key.fileobj)
                        self.index.leave(key.fileobj)
                        key.fileobj.close()
                if keeper is not None:
                    keeper.look()
                self._relieve()

    def _answer(self, client: socket.socket) -> bool:
        """One message; False when the client is gone or not to be trusted."""
        try:
            message = client.recv(limits.PARK_MESSAGE_BYTES + 1)  # no room for descriptors: the kernel drops any
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        fds: list[int] = []
        try:
            fields = words.decode(message)
            reply = words.encode({"punches": self._punches, **self._do(client, fields, fds)})
        except ParkError as error:
            refused = {"punches": self._punches, "refused": error.code, "reason": str(error)[:200]}
            reply = words.encode(refused)
        except Exception:
            _log.exception("park_answer_failed")
            return False
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            client.sendmsg([reply], rights)
        except OSError:  # gone, or it does not read
            return False
        return True

    def _do(self, client: socket.socket, fields: dict[str, object], fds: list[int]) -> dict[str, object]:
        match fields.get("op"):
            case "hello":
                if fields.get("v") != words.VERSION:
                    raise ParkRefused(f"version {words.VERSION} is spoken here")
                fds.append(self._memory.fd)
                return {
                    "segment_bytes": self._segment_bytes, "total_bytes": self._memory.total_bytes,
                    "generation": self.generation,
                }  # fmt: skip
            case "lease":
                return {"segments": self._lease(client, fields)}
            case "room":
                return {"segments": self._room(client, fields)}
            case "name":
                digests = words.items(fields.get("digests"), limits.PARK_BLOBS_PER_MESSAGE)
                self.index.name(client, [words.octets(digest) for digest in digests])
                return {}
            case "publish":
                marks = words.items(fields.get("marks"), limits.PARK_MARKS, 3)
                number = self.index.publish(
                    client,
                    words.octets(fields.get("tenant")),
                    words.whole(fields.get("pages"), 0, limits.PARK_BLOBS),
                    [Mark(words.whole(t, 1, 1 << 32), words.octets(c), words.whole(p)) for t, c, p in marks],
                )
                return {"number": number}
            case "abandon":
                self.index.abandon(client)
                return {}
            case "changes":
                return self._changes(words.whole(fields.get("after")))
            case "pin":
                number = words.whole(fields.get("number"))
                header = self.index.pin(client, number, words.octets(fields.get("tenant"))).header
                return {"header": [header.digest, header.size_bytes, header.segments]}
            case "where":
                digests = words.items(fields.get("digests"), limits.PARK_BLOBS_PER_MESSAGE)
                found = self.index.where(client, words.whole(fields.get("number")), [words.octets(d) for d in digests])
                return {"blobs": [None if b is None else [b.size_bytes, b.segments] for b in found]}
            case "unpin":
                self.index.unpin(client, words.whole(fields.get("number")))
                return {}
        raise ParkRefused("not a word of this protocol")

    def _lease(self, client: socket.socket, fields: dict[str, object]) -> list[tuple[int, ...] | bool]:
        tenant = words.octets(fields.get("tenant"))
        blobs = words.items(fields.get("blobs"), limits.PARK_BLOBS_PER_MESSAGE, 2)
        wanted = [(words.octets(d), words.whole(s, 0, self._memory.total_bytes)) for d, s in blobs]
        answers = self.index.lease(client, tenant, wanted, fresh=self._fresh())
        for segments in answers:
            self._clear(segments if isinstance(segments, tuple) else (), tenant)
        return answers

    def _room(self, client: socket.socket, fields: dict[str, object]) -> list[tuple[int, ...]]:
        tenant = words.octets(fields.get("tenant"))
        sizes = words.items(fields.get("sizes"), limits.PARK_BLOBS_PER_MESSAGE)
        wanted = [words.whole(size, 1, self._memory.total_bytes) for size in sizes]
        answers = self.index.room(client, tenant, wanted, fresh=self._fresh())
        for segments in answers:
            self._clear(segments, tenant)
        return answers

    def _fresh(self) -> int:
        """How many segments that were never used may be taken."""
        now_s, touched = time.monotonic(), self.index.touched_segments
        if now_s > self._room_s + _ROOM_S:
            room_bytes = host_memory.available_bytes() - host_memory.floor_bytes()
            self._room_s, self._room_until = now_s, touched + room_bytes // self._segment_bytes
        return max(0, self._room_until - touched)

    def _clear(self, segments: tuple[int, ...], tenant: bytes) -> None:
        """They are this tenant's from now on."""
        for number in segments:
            if self._last_tenant.get(number, tenant) != tenant:
                self._memory.segment(number)[:] = 0
            self._last_tenant[number] = tenant

    def _changes(self, after: int) -> dict[str, object]:
        changes = self.index.changes(after)

        def told(entry: Entry) -> list[object]:
            return [entry.number, entry.tenant, [[mark.tokens, mark.chain] for mark in entry.marks]]

        return {
            "touched": self.index.touched_segments,
            "sequence": changes.sequence, "void": changes.void, "more": changes.more, "removed": changes.removed,
            "entries": [told(entry) for entry in changes.entries],
        }  # fmt: skip

    def _relieve(self) -> None:
        """Gives memory back while the host is short of it."""
        if time.monotonic() < self._looked_s + _RELIEF_S:
            return
        self._looked_s = time.monotonic()
        while host_memory.available_bytes() < host_memory.floor_bytes() and self.index.evict():
            given = self.index.forget_fresh()
            if not given:  # lanes register everything anew for each punch
                continue
            for number in given:
                self._last_tenant.pop(number, None)
            with contextlib.suppress(ParkError):
                self._punches += 1
                self._memory.punch(given)
