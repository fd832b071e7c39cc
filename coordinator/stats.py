"""What the request side tells about itself as it happens: the seam between those who serve and whoever counts.

    doors ────────────── refused before it was queued ──▶ Recorder
    Generation, Answer ──▶ Timeline (one per request) ──▶ Recorder

Not here: how it is kept or shown (metrics). Pure: the clock is an argument. Invariants: a request is recorded exactly
once, with the end that its client saw; nothing recorded says who asked or what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from laneproto.v1 import lane_pb2

Door = Literal["http", "grpc"]
COMPLETE = ("stop", "length")  # outcomes of answers that ended by themselves; every other one is an error's code


class Recorder(Protocol):
    """Takes what happens. All calls come from the coordinator's event loop."""

    def request(self, door: Door, outcome: str) -> None:
        """A request has ended: a finish reason, or the stable code of an error."""
        ...

    def accepted(self, prompt_tokens: int, waited_s: float) -> None:
        """A lane has begun with a request."""
        ...

    def first_token(self, seconds: float) -> None:
        """The first token of an answer is here, so long after the request was queued."""
        ...

    def tokens(self, count: int, gaps_s: Sequence[float]) -> None:
        """More tokens of an answer, and the times between them and the one before, as the lane stamped them."""
        ...

    def complete(self, seconds: float) -> None:
        """An answer ended by itself, so long after the request was queued."""
        ...


class Silent:
    """A recorder that keeps nothing."""

    def request(self, door: Door, outcome: str) -> None:
        """Nothing."""

    def accepted(self, prompt_tokens: int, waited_s: float) -> None:
        """Nothing."""

    def first_token(self, seconds: float) -> None:
        """Nothing."""

    def tokens(self, count: int, gaps_s: Sequence[float]) -> None:
        """Nothing."""

    def complete(self, seconds: float) -> None:
        """Nothing."""


class Timeline:
    """The times of one request, from the moment it was made."""

    def __init__(self, recorder: Recorder, door: Door, clock: Callable[[], float]) -> None:
        self._recorder, self._door, self._clock = recorder, door, clock
        self._queued_at = clock()
        self._last_stamp_ns: int | None = None
        self._ended = False

    def accepted(self, prompt_tokens: int) -> None:
        """A lane has begun with it."""
        self._recorder.accepted(prompt_tokens, self._clock() - self._queued_at)

    def tokens(self, tokens: Sequence[lane_pb2.Token]) -> None:
        """More tokens came."""
        gaps_s = []
        for token in tokens:
            if self._last_stamp_ns is None:
                self._recorder.first_token(self._clock() - self._queued_at)
            else:
                gaps_s.append(max(0, token.stamp_ns - self._last_stamp_ns) / 1e9)
            self._last_stamp_ns = token.stamp_ns
        self._recorder.tokens(len(tokens), gaps_s)

    def ended(self, outcome: str) -> None:
        """Its client saw this end. Later ones are ignored: an answer read to its end is no longer cancelled."""
        if self._ended:
            return
        self._ended = True
        self._recorder.request(self._door, outcome)
        if outcome in COMPLETE:
            self._recorder.complete(self._clock() - self._queued_at)
