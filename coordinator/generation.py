"""One request on its way: what a door holds in its hand while dispatch moves the request through queue and lane.

      dispatch ──begin, push…, end | fail──▶ Generation ──read()──▶ door
      dispatch ◀──────── cancel_wanted ───── Generation ◀──cancel── door

Not here: which lane, text. Invariants: a reader sees at most one `Begun`, then tokens in order, then exactly one end:
an `Ended` or one raised error, whatever came first; what came before the end is read before it. Never more than
`limits.BUFFERED_TOKENS` wait for a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.errors import CoordinatorError
from coordinator.request import Request
from coordinator.stats import Silent, Timeline
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
        self, request: Request, *, on_cancel: Callable[[Generation], None], timeline: Timeline | None = None
    ) -> None:
        self.request = request
        self.timeline = timeline or Timeline(Silent(), "http", lambda: 0.0)
        self.lane: str | None = None  # once begun
        self.cancel_wanted = asyncio.Event()
        self.tokens_seen = 0
        self._on_cancel = on_cancel
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

    def begin(self, lane: str) -> None:
        """A lane has accepted."""
        if self._end is None and self.lane is None:
            self.lane, self._begun_unread = lane, True
            self.timeline.accepted(len(self.request.prompt_ids))
            self._news.set()

    def push(self, tokens: Sequence[lane_pb2.Token]) -> bool:
        """More tokens; False when the reader is too far behind to take them."""
        if self._end is not None or self.cancel_wanted.is_set():
            return True  # nobody wants them
        if len(self._unread) + len(tokens) > limits.BUFFERED_TOKENS:
            return False
        self.tokens_seen += len(tokens)
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
        return True
