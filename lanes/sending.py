"""Tokens of one answer on their way from their draw to its reader.

A token is handed over beside the window that it starts, or beside the guesses for it, not before: waking the reader,
and the reader's thread, cost time in which the device would have nothing to do. What a reader sees is the same tokens
in the same order.

Not here: drawing (answer), the reader's queue (outbox). Invariant: what waits here finds room in the outbox, so `send`
never waits; who must wait for the reader does so in `add`, before the next window.
"""

from __future__ import annotations

from collections.abc import Callable

from lanes import limits
from lanes.counters import Counters
from lanes.generation import Generation
from lanes.outbox import Token


class Sending:
    """Of one generation; the engine's thread uses it."""

    def __init__(self, generation: Generation, counters: Counters, publish: Callable[[], None]) -> None:
        """`publish` makes counters public."""
        self._generation, self._counters, self._publish = generation, counters, publish
        self._drawn: list[Token] = []

    def add(self, token: Token) -> bool:
        """One more token; False when the reader made no room for it for too long."""
        self._drawn.append(token)
        return len(self._drawn) <= self._generation.outbox.room or self._put()

    def send(self) -> None:
        """Hands over what was drawn."""
        if self._drawn:
            self._put()

    def _put(self) -> bool:
        generation, drawn = self._generation, self._drawn
        self._drawn = []
        for token in drawn:
            if not generation.outbox.put(token, generation.cancelled, limits.SLOW_READER_S):
                return False
            generation.sent += 1
            self._counters.generated_tokens += 1
            self._publish()
        return True
