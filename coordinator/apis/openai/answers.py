"""What OpenAI clients get: answers, chunks and errors as plain data, ready for JSON.

Not here: HTTP, event streams. Invariant: the texts of a stream's chunks joined are the text of the whole answer, and so
are their log-probabilities; tokens of a stop string are in neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format

from coordinator.answer import AnswerToken, Final
from coordinator.apis.approximate import prompt_routing
from coordinator.apis.writer import Event
from coordinator.chat import Called, Said, Turn, TurnEnd
from coordinator.errors import CoordinatorError
from coordinator.text.answer_parser import Content, Reasoning
from coordinator.text.desk import TextDesk
from laneproto.v1 import lane_pb2

_REASONS = {
    lane_pb2.FINISH_REASON_STOP: "stop",
    lane_pb2.FINISH_REASON_LENGTH: "length",
}


def error_body(error: CoordinatorError) -> dict[str, Any]:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if error.http < 500 and not error.retryable else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


@dataclass(slots=True)
class CompletionWriter:
    """Both completion endpoints: answers in one body or as chunks."""

    chat: bool
    request_id: str
    model: str
    created: int  # seconds since 1970
    seed: int
    text: TextDesk
    logprobs: bool = False
    include_usage: bool = False
    _opened: bool = False

    def whole(self, turn: Turn, end: TurnEnd) -> dict[str, Any]:
        """The answer in one body."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(end)}
        if self.chat:
            choice["message"] = _message(turn)
        else:
            choice["text"] = turn.content
        choice["logprobs"] = self._logprobs(turn.tokens) if self.logprobs else None
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "usage": usage_body(end),
            "expressway": self._expressway(end.final),
        }

    def begin(self) -> Iterable[Event]:
        """Nothing: the role comes with the first text."""
        return ()

    def said(self, said: Said) -> Iterable[Event]:
        """A chunk for each part; the tokens go with the first."""
        deltas = [self._delta(part) for part in said.parts]
        if self.logprobs and said.tokens and not deltas:
            deltas.append({"content": ""} if self.chat else "")
        tokens = said.tokens if self.logprobs else ()
        for delta in deltas:
            yield from self._opening()
            yield Event(self._chunk(delta, tokens, None))
            tokens = ()

    def end(self, end: TurnEnd) -> Iterable[Event]:
        """The chunk with the reason of the end and what the lane counted, and that of usage if it was asked for."""
        yield from self._opening()
        chunk = self._chunk({} if self.chat else "", (), _reason(end))
        yield Event({**chunk, "expressway": self._expressway(end.final)})
        if self.include_usage:
            yield Event({**self._head(self._chunk_kind()), "choices": [], "usage": usage_body(end)})
        yield Event("[DONE]")

    def failed(self, error: CoordinatorError) -> Iterable[Event]:
        """One error event."""
        yield Event(error_body(error))

    def ping(self) -> Event | None:
        """A comment will do."""
        return None

    def _opening(self) -> Iterable[Event]:
        if self.chat and not self._opened:
            yield Event(self._chunk({"role": "assistant", "content": ""}, (), None))
        self._opened = True

    def _delta(self, part: Reasoning | Content | Called) -> Any:
        match part:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text} if self.chat else text
            case Called():
                return {"tool_calls": [{"index": part.index, **_call(part)}]}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, delta: Any, tokens: Sequence[AnswerToken], reason: str | None) -> dict[str, Any]:
        body = "delta" if self.chat else "text"
        choice = {
            "index": 0,
            body: delta,
            "logprobs": None if not tokens else self._logprobs(tokens),
            "finish_reason": reason,
        }
        return {**self._head(self._chunk_kind()), "choices": [choice]}

    def _expressway(self, final: Final) -> dict[str, Any]:
        counters = json_format.MessageToDict(
            final.counters, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        # protobuf's JSON writes 64-bit integers as strings; a count is a number here
        approximate = {"approximate": list(final.usage.approximations)} if final.usage.approximations else {}
        return {
            "request_id": self.request_id,
            "lane": final.lane,
            **approximate,
            "seed": self.seed,
            "counters": {name: int(value) for name, value in counters.items()},
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        return self._chat_logprobs(tokens) if self.chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        def entry(token: lane_pb2.Token | lane_pb2.TokenLogprob) -> dict[str, Any]:
            return {
                "token": self.text.token_text(token.id),
                "logprob": _finite(token.logprob),
                "bytes": list(self.text.token_bytes(token.id)),
            }

        content = [
            {**entry(known.token), "top_logprobs": [entry(other) for other in known.token.top]} for known in tokens
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        text = self.text.token_text
        return {
            "tokens": [text(known.token.id) for known in tokens],
            "token_logprobs": [_finite(known.token.logprob) for known in tokens],
            # two tokens of the same text (parts of characters): the likelier one, which comes first, stays
            "top_logprobs": [
                {text(other.id): _finite(other.logprob) for other in reversed(known.token.top)} for known in tokens
            ],
            "text_offset": [known.start for known in tokens],
        }


def model_card(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """One entry of /v1/models, which clients of both APIs can read."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "display_name": name,
        "owned_by": "expressway",
        "max_model_len": context_tokens,
    }


def _reason(end: TurnEnd) -> str:
    return "tool_calls" if end.called else _REASONS.get(end.final.reason, "stop")


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call(called) for called in turn.calls]
        message["content"] = turn.content or None
    return message


def _call(called: Called) -> dict[str, Any]:
    function = {"name": called.call.name, "arguments": json.dumps(called.call.arguments, ensure_ascii=False)}
    return {"id": f"call_{called.id}", "type": "function", "function": function}


def usage_body(end: TurnEnd) -> dict[str, Any]:
    """Usage in OpenAI's older shape."""
    usage = end.final.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": end.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_draft_tokens,
        },
        **prompt_routing(usage),
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; the API writes -9999 for what is as good as impossible."""
    return logprob if logprob > -9999.0 else -9999.0
