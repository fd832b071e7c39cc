"""First come, first served, with a bound. Pure: no clock, no loop.

Not here: fairness between tenants, priorities, and what a waiting request is. Invariants: order of arrival, except that
a request which a lane handed back stands at the head again; at most `bound` requests are admitted at the tail; a
removed request leaves at once and its place is free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from coordinator.errors import QueueFull

_T = TypeVar("_T")


class RequestQueue(Generic[_T]):
    """Waiting requests by id."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: OrderedDict[str, _T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[_T]:
        """The requests, the next one first."""
        return iter(tuple(self._waiting.values()))

    def push(self, request_id: str, item: _T) -> None:
        """At the tail; `QueueFull` at the bound."""
        if len(self._waiting) >= self._bound:
            raise QueueFull(f"all {self._bound} places of the queue are taken")
        self._waiting[request_id] = item

    def push_front(self, request_id: str, item: _T) -> None:
        """At the head: for a request that had left the queue and could not begin. It was admitted once: no bound."""
        self._waiting[request_id] = item
        self._waiting.move_to_end(request_id, last=False)

    def head(self) -> _T | None:
        """The next request; it stays in the queue."""
        return next(iter(self._waiting.values()), None)

    def remove(self, request_id: str) -> bool:
        """Takes a request out, wherever it stands; whether it was there."""
        return self._waiting.pop(request_id, None) is not None

    def position(self, request_id: str) -> int | None:
        """How many requests are before this one."""
        return next((place for place, waiting in enumerate(self._waiting) if waiting == request_id), None)
