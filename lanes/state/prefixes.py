"""What a lane can go on from, as a numbered log of changes: the truth that placement rests on.

Written by the engine's thread, read by any. Not here: what a prefix is (conversations), the wire. Invariants: numbers
rise by one; a reader that applies every change after a snapshot has what is there; the log is bounded, and a reader
that fell behind it gets a snapshot.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lanes import limits

Key = tuple[bytes, int]  # the chain of whole blocks, tokens


class Place(enum.IntEnum):
    """Where a prefix is; the values of lane.proto."""

    LIVE = 1
    PARKED = 2


@dataclass(frozen=True, slots=True)
class News:
    """One change, or the first part of what a reader must know."""

    sequence: int
    added: tuple[tuple[Key, Place], ...]
    removed: tuple[Key, ...] = ()
    snapshot: bool = False
    complete: bool = False


class PrefixLog:
    """The prefixes of now, and the changes that led there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[Key, Place] = {}
        self._news: deque[News] = deque(maxlen=limits.PREFIX_NEWS)
        self._sequence = 0
        self.residents = 0

    @property
    def sequence(self) -> int:
        """Of the last change."""
        return self._sequence

    def publish(self, now: Mapping[Key, Place]) -> None:
        """From now on these are there; most that are wanted."""
        kept = dict(list(now.items())[-limits.PREFIXES :])
        with self._lock:
            added = tuple((key, place) for key, place in kept.items() if self._now.get(key) is not place)
            removed = tuple(key for key in self._now if key not in kept)
            if added or removed:
                self._sequence += 1
                self._now = kept
                if len(added) + len(removed) > limits.PREFIXES_PER_EVENT:
                    self._news.clear()  # too much for one event: everybody starts again
                else:
                    self._news.append(News(self._sequence, added, removed))

    def after(self, sequence: int | None) -> list[News]:
        """What came after that number; with None, or where it is too long ago, a snapshot in parts."""
        with self._lock:
            if sequence is not None and sequence == self._sequence:
                return []
            if sequence is not None and self._news and self._news[0].sequence <= sequence + 1:
                return [news for news in self._news if news.sequence > sequence]
            held, size = list(self._now.items()), limits.PREFIXES_PER_EVENT
            parts = [tuple(held[first : first + size]) for first in range(0, len(held), size)] or [()]
            return [
                News(self._sequence, part, snapshot=True, complete=number == len(parts))
                for number, part in enumerate(parts, 1)
            ]
