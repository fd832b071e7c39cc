"""The answer to one request as text: a generation's tokens, detokenized, up to the first stop string.

Not here: wire formats. Invariants: the pieces' texts joined are the answer's text, which holds no stop string and
nothing of a stop id; every token is in exactly one piece until the answer is complete; what is known before the end or
an error is read before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.apis.approximate import read_so
from coordinator.errors import Cancelled, CoordinatorError
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stops import StopScanner
from laneproto.v1 import lane_pb2


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token and where its text begins in the answer, in characters (stop strings still counted in)."""

    token: lane_pb2.Token
    start: int
    is_stop: bool  # a stop id: it has no text


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more of the answer."""

    text: str
    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True, slots=True)
class Final:
    """The end. `stopped_by_text`: a stop string was complete; tokens past it are not counted."""

    reason: lane_pb2.FinishReason
    usage: lane_pb2.Usage
    counters: lane_pb2.Counters
    lane: str
    stopped_by_text: bool
    stop: str | None = None  # the stop string, then


class Answer:
    """Reads one generation. One reader."""

    def __init__(self, generation: Generation, detokenizer: Detokenizer) -> None:
        self.generation = generation
        self.request = generation.request
        self._detokenizer = detokenizer
        self._scanner = StopScanner(self.request.stops)
        self._stop_ids = frozenset(self.request.stop_ids)
        self._decoded = 0  # characters, whether shown yet or not
        self._tokens = 0
        self._end: Final | CoordinatorError | None = None
        self._due: deque[Begun | Piece | Final] = deque()

    async def read(self) -> Begun | Piece | Final:
        """The next event; raises the error that ended the request. May be cancelled and called again."""
        while not self._due:
            if isinstance(self._end, CoordinatorError):
                self.generation.timeline.ended(self._end.code)
                raise self._end
            try:
                event = await self.generation.read()
            except CoordinatorError as error:
                self._on_error(error)
                continue
            match event:
                case Begun():
                    self._due.append(event)
                case Tokens():
                    self._on_tokens(event)
                case Ended():
                    self._on_end(event)
        due = self._due.popleft()
        if isinstance(due, Final):
            reason = lane_pb2.FinishReason.Name(due.reason).removeprefix("FINISH_REASON_").lower()
            replaced = due.usage.replaced_choices if read_so(due.usage) else None
            self.generation.timeline.ended(reason, due.usage.cached_tokens, replaced)
        return due

    def usage(self) -> lane_pb2.Usage:
        """As far as it is known without the lane."""
        return lane_pb2.Usage(prompt_tokens=len(self.request.prompt_ids), completion_tokens=self._tokens)

    def cancel(self) -> None:
        """Nobody wants the rest. Idempotent."""
        self.generation.cancel()
        self.generation.timeline.ended(Cancelled.code)

    def _on_tokens(self, event: Tokens) -> None:
        if self._scanner.stopped:
            return
        texts: list[str] = []
        tokens: list[AnswerToken] = []
        for token in event.tokens:
            is_stop = token.id in self._stop_ids
            decoded = "" if is_stop else self._detokenizer.feed(token.id)
            tokens.append(AnswerToken(token, self._decoded, is_stop))
            texts.append(self._scanner.feed(decoded, may_stop=self._may_stop()))
            self._decoded += len(decoded)
            self._tokens += 1
            if self._scanner.stopped:
                self.generation.cancel()
                break
        self._due.append(Piece("".join(texts), tuple(tokens)))

    def _on_end(self, event: Ended) -> None:
        self._flush()
        reason, usage = event.reason, event.usage
        if self._scanner.stopped:
            reason = lane_pb2.FINISH_REASON_STOP
            usage = lane_pb2.Usage.FromString(usage.SerializeToString())
            usage.completion_tokens = self._tokens
        scanner, lane = self._scanner, self.generation.lane or ""
        self._due.append(Final(reason, usage, event.counters, lane, scanner.stopped, scanner.stop))

    def _on_error(self, error: CoordinatorError) -> None:
        if self._scanner.stopped:  # the answer was complete: what the lane did afterwards is not the client's concern
            self._on_end(Ended(lane_pb2.FINISH_REASON_STOP, self.usage(), lane_pb2.Counters()))
            return
        self._flush()
        self._end = error

    def _may_stop(self) -> bool:
        """Whether the answer is long enough for a stop string to count."""
        return self._tokens >= self.request.sampling.min_tokens

    def _flush(self) -> None:
        if self._scanner.stopped:
            return
        text = self._scanner.feed(self._detokenizer.flush(), may_stop=self._may_stop())
        if not self._scanner.stopped:
            text += self._scanner.flush()
        if text:
            self._due.append(Piece(text, ()))
