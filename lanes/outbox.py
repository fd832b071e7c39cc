"""The way of one generation's events from the engine's thread to the event loop.

Not a general queue: one writer (engine), one reader (the stream's handler). The reader takes everything there is at
once, and the writer wakes the loop only when the reader sleeps, so a fast generation costs no wake-up per token.

Invariant: at most `limit` tokens wait; the end always fits; nothing is kept once the reader has closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lanes.counters import Counters
from lanes.sampler import Logprobs


@dataclass(frozen=True, slots=True)
class Token:
    """One chosen token."""

    id: int
    stamp_ns: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended. Reasons: stop, length, cancelled, error (then with a code of `lanes.errors`)."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    counters: Counters
    error_code: str = ""
    error_message: str = ""
    cached_tokens: int = 0  # of the prompt, not read again
    restored_tokens: int = 0  # of these, from the park pool
    waited_windows: int = 0  # of another generation, after it was accepted and before its own first


class Outbox:
    """Bounded hand-over; `put` and `finish` are the engine's, `take` and `close` the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self._loop = loop
        self._limit = limit
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._events: deque[Token | End] = deque()
        self._wake = asyncio.Event()
        self._asleep = False
        self._closed = False

    @property
    def room(self) -> int:
        """So many tokens can be put without waiting; the reader only ever makes it more."""
        return self._limit - (0 if self._closed else len(self._events))

    def put(self, token: Token, stopped: Callable[[], bool], patience_s: float) -> bool:
        """Adds a token; waits for room until `stopped()`. False when there was none for `patience_s`."""
        deadline_s = time.monotonic() + patience_s
        with self._lock:
            while len(self._events) >= self._limit and not self._closed:
                if stopped():
                    return True
                if time.monotonic() >= deadline_s:
                    return False
                self._room.wait(0.05)
            if not self._closed:
                self._events.append(token)
                self._notify()
        return True

    def finish(self, end: End) -> None:
        """Adds the end, room or not; it is the last event."""
        with self._lock:
            if not self._closed:
                self._events.append(end)
                self._notify()

    def close(self) -> None:
        """The reader is gone: what waits is dropped, what comes is ignored."""
        with self._lock:
            self._closed = True
            self._events.clear()
            self._room.notify()

    async def take(self) -> list[Token | End]:
        """Everything that waits, at least one event."""
        while True:
            with self._lock:
                if self._events:
                    events = list(self._events)
                    self._events.clear()
                    self._room.notify()
                    return events
                self._asleep = True
                self._wake.clear()
            await self._wake.wait()

    def _notify(self) -> None:
        """Wakes the reader if it sleeps; called with the lock held."""
        if self._asleep:
            self._asleep = False
            self._loop.call_soon_threadsafe(self._wake.set)
