"""An answer as a conversation's next turn: reasoning, text and calls of tools, from the text of an `Answer`.

Not here: wire formats, HTTP. Invariants: as of `Answer`; calls are numbered from 0 in the order they were written, and
each has an id that no other answer's call has.
"""

from __future__ import annotations

import bisect
from array import array
from collections import deque
from dataclasses import dataclass, field

from coordinator.answer import Answer, AnswerToken, Final, Piece
from coordinator.apis.ask import ChatAsk
from coordinator.apis.logprobs import LogprobFeed
from coordinator.errors import BadRequest
from coordinator.generation import Begun
from coordinator.request import Draft, check_session
from coordinator.sampling import Defaults
from coordinator.serving import Caller, Serving
from coordinator.telemetry.stats import Door
from coordinator.text.answer_parser import AnswerParser, Content, Part, Reasoning
from coordinator.text.conversation import ToolCall


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool, whole."""

    index: int
    id: str  # of letters and digits; APIs put their own prefix before it
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Said:
    """Some more of the turn. `tokens`: those whose text has come by now."""

    parts: tuple[Reasoning | Content | Called, ...]
    tokens: tuple[AnswerToken, ...]


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end. `called`: the turn has calls of tools. `reasoning_tokens` are those that began inside the reasoning."""

    final: Final
    called: bool
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Turn:
    """A whole turn, gathered."""

    reasoning: str = ""
    content: str = ""
    calls: list[Called] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)

    def add(self, said: Said) -> None:
        """Some more."""
        self.tokens += said.tokens
        for part in said.parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case Called():
                    self.calls.append(part)


class TurnReader:
    """Reads one answer as a turn. One reader."""

    def __init__(self, answer: Answer, parser: AnswerParser, *, parallel: bool = True) -> None:
        self.answer = answer
        self.request = answer.request
        self._parser = parser
        self._parallel = parallel
        self._feed = LogprobFeed()
        self._calls = 0
        self._starts = array("Q")  # of the answer's tokens, in characters
        self._due: deque[Said | TurnEnd] = deque()

    async def read(self) -> Begun | Said | TurnEnd:
        """The next event; raises the error that ended the request. May be cancelled and called again."""
        while not self._due:
            event = await self.answer.read()
            match event:
                case Begun():
                    return event
                case Piece():
                    self._starts.extend(entry.start for entry in event.tokens)
                    self._add(self._parser.feed(event.text), self._feed.feed(event))
                case Final():
                    self._add(self._parser.flush(), self._feed.flush(event))
                    reasoning_tokens = bisect.bisect_left(self._starts, self._parser.reasoned)
                    self._due.append(TurnEnd(event, self._calls > 0, reasoning_tokens))
        return self._due.popleft()

    def _add(self, parts: list[Part], tokens: list[AnswerToken]) -> None:
        said: list[Reasoning | Content | Called] = []
        for part in parts:
            if self._calls and not self._parallel:
                break  # one call was asked for: what follows it is nobody's
            if isinstance(part, ToolCall):
                said.append(Called(self._calls, f"{self.request.id}{self._calls:02d}", part))
                self._calls += 1
            else:
                said.append(part)
        if said or tokens:
            self._due.append(Said(tuple(said), tuple(tokens)))


async def begin_turn(
    serving: Serving, ask: ChatAsk, caller: Caller, *, door: Door = "http", defaults: Defaults | None = None
) -> TurnReader:
    """Renders, checks and queues; `defaults` of the sampling are the pack's, unless a door has its own.

    Raises `RequestError`, or `Refused` when there is no place or no lane.
    """
    model = serving.check_model(ask.model)
    text, conversation, grammar = serving.text, ask.conversation, ""
    if ask.bound is not None:
        conversation, grammar = await text.bind(conversation, ask.bound, parallel=ask.parallel)
    prompt = await text.encode_chat(conversation, context_tokens=model.context_tokens)
    draft = Draft(
        prompt_ids=prompt,
        prompt_param="messages",
        default_seed=serving.new_seed(),
        defaults=defaults or serving.generation.defaults,
        wanted=ask.wanted,
        max_tokens=ask.max_tokens,
        max_tokens_param=ask.max_tokens_param,
        stops=ask.stops,
        stop_ids=ask.stop_ids,
        stop_ids_param=ask.stop_ids_param,
        end_ids=(*text.chat_end_ids(), *serving.generation.end_ids),
        ignore_eos=ask.ignore_eos,
        grammar=grammar,
        logprobs=ask.logprobs,
        top_logprobs=ask.top_logprobs,
        top_logprobs_param=ask.top_logprobs_param,
        session=caller.session or _hint(ask),
        parent_session=caller.parent_session,
        tenant=caller.tenant,
        priority=caller.priority,
        timeout_s=caller.timeout_s,
    )
    answer = await serving.submit(draft, caller, door)
    return TurnReader(answer, text.parser(conversation, calls=ask.calls), parallel=ask.parallel)


def _hint(ask: ChatAsk) -> str | None:
    """A key of the body may be anything: where it is no session id, it is none."""
    try:
        return check_session(ask.session_hint)
    except BadRequest:
        return None


def read_text(answer: Answer) -> TurnReader:
    """An answer that is text and nothing else."""
    return TurnReader(answer, AnswerParser(None, in_reasoning=False, thinks=False))
