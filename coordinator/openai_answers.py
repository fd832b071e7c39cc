"""What OpenAI clients get: answers, chunks and errors as plain data, ready for JSON.

Not here: HTTP, event streams. Invariant: the texts of a stream's chunks joined are the text of the whole answer, and so
are their log-probabilities; tokens of a stop string are in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf import json_format

from coordinator.answer import AnswerToken, Final, Piece
from coordinator.errors import CoordinatorError
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


@dataclass(frozen=True, slots=True)
class Shape:
    """What is the same in all chunks of one answer."""

    chat: bool
    request_id: str
    model: str
    created: int  # seconds since 1970
    seed: int
    text: TextDesk

    def whole(self, text: str, tokens: Sequence[AnswerToken] | None, final: Final) -> dict[str, Any]:
        """The answer in one body; `tokens` only when log-probabilities were asked for."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": _REASONS.get(final.reason, "stop")}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = None if tokens is None else self._logprobs(tokens)
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "usage": _usage(final.usage),
            "expressway": self._expressway(final),
        }

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first token: the role, in a chat."""
        return self._chunk({"role": "assistant", "content": ""}, None, None) if self.chat else None

    def piece(self, text: str, tokens: Sequence[AnswerToken] | None) -> dict[str, Any]:
        """Some more of the answer."""
        return self._chunk({"content": text} if self.chat else text, tokens, None)

    def closing(self, tokens: Sequence[AnswerToken] | None, final: Final) -> dict[str, Any]:
        """The chunk with the reason of the end, and what the lane counted."""
        chunk = self._chunk({} if self.chat else "", tokens, _REASONS.get(final.reason, "stop"))
        return {**chunk, "expressway": self._expressway(final)}

    def usage(self, final: Final) -> dict[str, Any]:
        """The chunk of usage, after the end."""
        return {**self._head(self._chunk_kind()), "choices": [], "usage": _usage(final.usage)}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, delta: Any, tokens: Sequence[AnswerToken] | None, reason: str | None) -> dict[str, Any]:
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
        return {
            "request_id": self.request_id,
            "lane": final.lane,
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


class LogprobFeed:
    """Releases tokens together with their text, so that those of a stop string, whose text never comes, are dropped."""

    def __init__(self) -> None:
        self._held: list[AnswerToken] = []
        self._shown = 0  # characters

    def feed(self, piece: Piece) -> list[AnswerToken]:
        """The tokens whose text begins in what has been shown."""
        self._held += (known for known in piece.tokens if not known.is_stop)
        self._shown += len(piece.text)
        count = next((n for n, known in enumerate(self._held) if known.start >= self._shown), len(self._held))
        released, self._held = self._held[:count], self._held[count:]
        return released

    def flush(self, final: Final) -> list[AnswerToken]:
        """What is left at the end: tokens without text, or of a stop string."""
        released, self._held = self._held, []
        return [] if final.stopped_by_text else released


def model_card(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    kind: Literal["model"] = "model"
    return {"id": name, "object": kind, "created": created, "owned_by": "expressway", "max_model_len": context_tokens}


def _usage(usage: lane_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; the API writes -9999 for what is as good as impossible."""
    return logprob if logprob > -9999.0 else -9999.0
