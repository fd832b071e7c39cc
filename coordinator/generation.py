"""One request on its way: what a door holds in its hand while dispatch moves the request through queue and lane.

      dispatch ──begin, push…, end | fail──▶ Generation ──read()──▶ door
      dispatch ◀──────── cancel_wanted ───── Generation ◀──cancel── door

Not here: which lane, text. Invariants: a reader sees at most one `Begun`, then tokens in order, then exactly one end:
an `Ended` or one raised error, whatever came first; what came before the end is read before it. Never more than
`limits.BUFFERED_TOKENS` wait for a reader. What lanes have sent is kept, so that another lane can go on from there.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.errors import CoordinatorError
from coordinator.request import Request
from coordinator.telemetry.stats import Silent, Timeline
from laneproto.v1 import lane_pb2


@dataclass(frozen=True, slots=True)
class Begun:
    """A lane has accepted the request."""

    lane: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens in the order they were chosen."""

    tokens: Sequence[lane_pb2.Token]


@dataclass(frozen=True, slots=True)
class Ended:
    """The lane confirmed the end."""

    reason: lane_pb2.FinishReason
    usage: lane_pb2.Usage
    counters: lane_pb2.Counters


class Generation:
    """The handle of one request. One reader, one writer, one event loop."""

    def __init__(
        self,
        request: Request,
        *,
        on_cancel: Callable[[Generation], None],
        on_end: Callable[[Generation, Ended | CoordinatorError], None] = lambda generation, end: None,
        timeline: Timeline | None = None,
    ) -> None:
        self.request = request
        self.timeline = timeline or Timeline(Silent(), "http", lambda: 0.0)
        self.lane: str | None = None  # once begun; another one after a replay
        self.cancel_wanted = asyncio.Event()
        self.emitted = array("I")  # ids of all tokens so far, from whichever lanes
        self._on_cancel, self._on_end = on_cancel, on_end
        self._begun_unread = False
        self._unread: list[lane_pb2.Token] = []
        self._end: Ended | CoordinatorError | None = None
        self._news = asyncio.Event()

    # --- the door's side

    async def read(self) -> Begun | Tokens | Ended:
        """The next event; raises the error that ended the request. May be cancelled and called again."""
        while True:
            if self._begun_unread:
                self._begun_unread = False
                assert self.lane is not None
                return Begun(self.lane)
            if self._unread:
                tokens, self._unread = self._unread, []
                return Tokens(tokens)
            if isinstance(self._end, CoordinatorError):
                raise self._end
            if self._end is not None:
                return self._end
            self._news.clear()
            await self._news.wait()

    def cancel(self) -> None:
        """Nothing more is wanted: out of the queue at once, off the lane within a step. Idempotent."""
        if self._end is None and not self.cancel_wanted.is_set():
            self.cancel_wanted.set()
            self._on_cancel(self)

    # --- dispatch's side

    @property
    def ended(self) -> bool:
        """Whether the end is decided; it may still be unread."""
        return self._end is not None

    @property
    def tokens_seen(self) -> int:
        """Tokens of the answer so far."""
        return len(self.emitted)

    def begin(self, lane: str) -> None:
        """A lane has accepted; the reader is told of the first one."""
        if self._end is not None:
            return
        if self.lane is None:
            self._begun_unread = True
            self._news.set()
        self.timeline.accepted(len(self.request.prompt_ids), lane)
        self.lane = lane

    def completed(self) -> Ended | None:
        """The end, if all tokens are here and only the lane's last word is missing."""
        if not self.emitted:
            return None
        if self.emitted[-1] in self.request.stop_ids:
            reason = lane_pb2.FINISH_REASON_STOP
        elif len(self.emitted) >= self.request.max_tokens:
            reason = lane_pb2.FINISH_REASON_LENGTH
        else:
            return None
        usage = lane_pb2.Usage(prompt_tokens=len(self.request.prompt_ids), completion_tokens=len(self.emitted))
        return Ended(reason, usage, lane_pb2.Counters())

    def push(self, tokens: Sequence[lane_pb2.Token]) -> bool:
        """More tokens; False when the reader is too far behind to take them."""
        if self._end is not None or self.cancel_wanted.is_set():
            return True  # nobody wants them
        if len(self._unread) + len(tokens) > limits.BUFFERED_TOKENS:
            return False
        self.emitted.extend(token.id for token in tokens)
        self.timeline.tokens(tokens)
        self._unread.extend(tokens)
        self._news.set()
        return True

    def end(self, end: Ended | CoordinatorError) -> bool:
        """The one end; later ones are ignored. Whether this was it."""
        if self._end is not None:
            return False
        self._end = end
        self._news.set()
        self._on_end(self, end)
        return True
