"""A lane's end of the park pool: one connection to the owner and a map of the pool.

Not here: what a conversation is (lanes). Invariants: whatever goes wrong leaves this file as a ParkError; after one the
connection is closed, so that everything it held is free again; nothing waits longer than `CALL_LIMIT_S`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_experts import limits
from shared_experts import park_messages as words
from shared_experts.errors import HandoffError, ParkError, ParkFull, ParkRefused, ParkUnavailable, RegionError
from shared_experts.handoff import check_socket_path, peer_uid, receive_message
from shared_experts.park_memory import ParkMemory

CALL_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Parked:
    """A conversation as the owner tells of it: (tokens, chain) of every place where it can be taken up."""

    number: int
    tenant: bytes
    marks: tuple[tuple[int, bytes], ...]


class ParkClient:
    """Connects when it is made; raises ParkError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(CALL_LIMIT_S)
        self.memory: ParkMemory | None = None
        fds: list[int] = []
        try:
            self._socket.connect(check_socket_path(path))
            if peer_uid(self._socket) != os.geteuid():
                raise ParkRefused("another user's process listens there")
            reply = self._call({"op": "hello", "v": words.VERSION}, fds)
            if len(fds) != 1:
                raise ParkRefused("the owner sent no descriptor")
            self.generation = words.octets(reply.get("generation"))
            segment_bytes = words.whole(reply.get("segment_bytes"), 1, limits.PARK_POOL_BYTES)
            self.memory = ParkMemory(fds.pop(), segment_bytes)
        except (OSError, RegionError) as error:
            self.close()
            raise ParkUnavailable(f"no park pool: {error}") from error
        except ParkError:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Ends the connection and the map."""
        self._socket.close()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def lease(self, tenant: bytes, blobs: Sequence[tuple[bytes, int]]) -> list[tuple[int, ...] | bool]:
        """As `ParkIndex.lease`."""
        answers: list[tuple[int, ...] | bool] = []
        size = limits.PARK_BLOBS_PER_MESSAGE
        for first in range(0, len(blobs), size):
            part = blobs[first : first + size]
            reply = self._call({"op": "lease", "tenant": tenant, "blobs": part})
            for segments in words.items(reply.get("segments"), len(part)):
                answers.append(segments if type(segments) is bool else self._segments(segments))
        if len(answers) != len(blobs):
            raise ParkRefused("not one answer for each")
        return answers

    def room(self, tenant: bytes, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """As `ParkIndex.room`."""
        places: list[tuple[int, ...]] = []
        for first in range(0, len(sizes), limits.PARK_BLOBS_PER_MESSAGE):
            part = list(sizes[first : first + limits.PARK_BLOBS_PER_MESSAGE])
            reply = self._call({"op": "room", "tenant": tenant, "sizes": part})
            places += [self._segments(segments) for segments in words.items(reply.get("segments"), len(part))]
        if len(places) != len(sizes):
            raise ParkRefused("not one answer for each")
        return places

    def name(self, digests: Sequence[bytes]) -> None:
        """As `ParkIndex.name`."""
        for first in range(0, len(digests), limits.PARK_BLOBS_PER_MESSAGE):
            self._call({"op": "name", "digests": list(digests[first : first + limits.PARK_BLOBS_PER_MESSAGE])})

    def publish(self, tenant: bytes, pages: int, marks: Sequence[tuple[int, bytes, int]]) -> int:
        """As `ParkIndex.publish`; marks are (tokens, chain, pages)."""
        reply = self._call({"op": "publish", "tenant": tenant, "pages": pages, "marks": marks})
        return words.whole(reply.get("number"))

    def abandon(self) -> None:
        """What was leased will not be published."""
        self._call({"op": "abandon"})

    def changes(self, after: int) -> tuple[int, bool, bool, list[int], list[Parked]]:
        """(sequence, void, more, removed numbers, conversations), as `ParkIndex.changes`."""
        assert self.memory is not None
        reply = self._call({"op": "changes", "after": after})
        self.memory.touched_bytes = self.memory.segment_bytes * words.whole(
            reply.get("touched"), 0, self.memory.segments
        )
        entries = []
        for number, tenant, marks in words.items(reply.get("entries"), limits.PARK_ENTRIES, 3):
            found = words.items(marks, limits.PARK_MARKS, 2)
            told = tuple((words.whole(tokens, 1), words.octets(chain)) for tokens, chain in found)
            entries.append(Parked(words.whole(number), words.octets(tenant), told))
        removed = [words.whole(number) for number in words.items(reply.get("removed"), limits.PARK_REMOVALS)]
        flags = words.flag(reply.get("void")), words.flag(reply.get("more"))
        return words.whole(reply.get("sequence")), *flags, removed, entries

    def pin(self, number: int, tenant: bytes) -> tuple[bytes, int, tuple[int, ...]]:
        """(digest, size, segments) of the header of a conversation that now stays."""
        digest, size, segments = words.items(
            self._call({"op": "pin", "number": number, "tenant": tenant}).get("header"), 3
        )
        return words.octets(digest), self._size(size), self._segments(segments)

    def where(self, number: int, digests: Sequence[bytes]) -> list[tuple[int, tuple[int, ...]]]:
        """(size, segments) of parts of a pinned conversation; raises ParkRefused where one is gone."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for first in range(0, len(digests), limits.PARK_BLOBS_PER_MESSAGE):
            part = digests[first : first + limits.PARK_BLOBS_PER_MESSAGE]
            reply = self._call({"op": "where", "number": number, "digests": list(part)})
            blobs = words.items(reply.get("blobs"), len(part))
            if len(blobs) != len(part) or None in blobs:
                raise ParkRefused("a part is gone")
            found += [(self._size(size), self._segments(segments)) for size, segments in blobs]
        return found

    def unpin(self, number: int) -> None:
        """The conversation may go."""
        self._call({"op": "unpin", "number": number})

    def _size(self, value: object) -> int:
        assert self.memory is not None
        return words.whole(value, 0, self.memory.total_bytes)

    def _segments(self, value: object) -> tuple[int, ...]:
        assert self.memory is not None
        numbers = words.items(value, self.memory.segments)
        if not {int}.issuperset(map(type, numbers)):
            raise ParkRefused("a number is missing or out of range")
        for number in (min(numbers), max(numbers)) if numbers else ():
            words.whole(number, 0, self.memory.segments - 1)
        return tuple(numbers)

    def _call(self, fields: Mapping[str, object], fds: list[int] | None = None) -> dict[str, Any]:
        try:
            self._socket.send(words.encode(fields))
            message, received = receive_message(self._socket, limits.PARK_MESSAGE_BYTES)
        except (OSError, HandoffError) as error:
            raise ParkUnavailable(f"the owner does not answer: {error}") from error
        if fds is not None:
            fds.extend(received)
        else:
            for fd in received:
                os.close(fd)
        if not message:
            raise ParkUnavailable("the owner closed the connection")
        reply = words.decode(message)
        punches = words.whole(reply.get("punches"))
        if self.memory is not None:
            self.memory.punches = punches
        if refused := reply.get("refused"):
            raise (ParkFull if refused == ParkFull.code else ParkRefused)(str(reply.get("reason"))[:200])
        return reply
