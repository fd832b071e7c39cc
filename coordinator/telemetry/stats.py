"""What the request side tells about itself as it happens: the seam between those who serve and whoever counts.

    doors ────────────── refused before it was queued ──▶ Recorder
    Generation, Answer ──▶ Timeline (one per request) ──▶ Recorder, RequestRecord

Not here: how it is kept or shown (metrics, journal). Pure: the clock is an argument. Invariants: a request
is recorded exactly once, with the end that its client saw; nothing that a Recorder gets says who asked or what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from coordinator.telemetry.request_record import RequestRecord
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
    """The times of one request, from the moment it was made. With a record, they are kept there too."""

    def __init__(
        self,
        recorder: Recorder,
        door: Door,
        clock: Callable[[], float],
        record: RequestRecord | None = None,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._recorder, self._door, self._clock = recorder, door, clock
        self._queued_at = record.queued_s if record else clock()
        self._record, self._on_end = record, on_end
        self._last_stamp_ns: int | None = None
        self._begun = self._ended = False

    def accepted(self, prompt_tokens: int, lane: str = "") -> None:
        """A lane has begun with it: the first one, or one that goes on where another was lost."""
        now = self._clock()
        if self._record is not None:
            self._record.lanes.append((lane, self._record.tokens))
            if not self._begun:
                self._record.begun_s = now
        if not self._begun:
            self._begun = True
            self._recorder.accepted(prompt_tokens, now - self._queued_at)

    def tokens(self, tokens: Sequence[lane_pb2.Token]) -> None:
        """More tokens came."""
        gaps_s = []
        for token in tokens:
            if self._last_stamp_ns is None:
                now = self._clock()
                self._recorder.first_token(now - self._queued_at)
                if self._record is not None:
                    self._record.first_token_s = now
            else:
                gaps_s.append(max(0, token.stamp_ns - self._last_stamp_ns) / 1e9)
            self._last_stamp_ns = token.stamp_ns
        self._recorder.tokens(len(tokens), gaps_s)
        if (record := self._record) is not None:
            record.tokens += len(tokens)
            if record.stamps_ns is not None:
                room = record.stamps_limit - len(record.stamps_ns)
                record.stamps_ns.extend(token.stamp_ns for token in tokens[:room])

    def ended(self, outcome: str, cached_tokens: int = 0, replaced_choices: int | None = None) -> None:
        """Its client saw this end. Later ones are ignored: an answer read to its end is no longer cancelled."""
        if self._ended:
            return
        self._ended = True
        now = self._clock()
        self._recorder.request(self._door, outcome)
        if outcome in COMPLETE:
            self._recorder.complete(now - self._queued_at)
        if (record := self._record) is not None:
            record.outcome, record.ended_s, record.cached_tokens = outcome, now, cached_tokens
            record.replaced_choices = replaced_choices
            self._on_end(record)
