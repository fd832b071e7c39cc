"""What Anthropic's clients get: a message in content blocks, whole or as events, and errors in their shape.

    message_start  (content_block_start  content_block_delta…  content_block_stop)…  message_delta  message_stop

Not here: HTTP. Invariants: blocks are numbered from 0, one is open at a time, and each that was opened is closed; the
deltas of a block joined are the block of the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from coordinator.apis.approximate import prompt_routing
from coordinator.apis.writer import Event, dump
from coordinator.chat import Called, Said, Turn, TurnEnd
from coordinator.errors import ContextLengthExceeded, CoordinatorError
from coordinator.text.answer_parser import Content, Reasoning
from laneproto.v1 import lane_pb2

# Clients send a block of thinking back only with a signature; nothing is signed here, and none is checked.
SIGNATURE = "expressway"
OVERLOADED = 529

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_status(error: CoordinatorError) -> int:
    """The HTTP status: this API's own for a server that has no room."""
    return OVERLOADED if error.http == 503 else error.http


def error_body(error: CoordinatorError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's error shape."""
    kind = _TYPES.get(error.http, "invalid_request_error" if error.http < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # the words that clients look for before they shorten it
        message = f"prompt is too long: {message}"
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    found = {"type": kind, "message": message, "code": error.code}
    return {"type": "error", "error": found, "request_id": request_id}


@dataclass(slots=True)
class MessageWriter:
    """One answer."""

    request_id: str
    model: str
    prompt_tokens: int
    _next: int = 0  # number of the next block
    _open: type[Reasoning] | type[Content] | None = None

    def whole(self, turn: Turn, end: TurnEnd) -> dict[str, Any]:
        """The message in one body."""
        content: list[dict[str, Any]] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": SIGNATURE})
        if turn.content:
            content.append({"type": "text", "text": turn.content})
        content += [{**_call(called), "input": called.call.arguments} for called in turn.calls]
        return {**self._message(content, _usage(end.final.usage)), **_stop(end)}

    def begin(self) -> Iterable[Event]:
        """The message, still empty."""
        usage = _usage(lane_pb2.Usage(prompt_tokens=self.prompt_tokens))
        yield _event("message_start", message=self._message([], usage))

    def said(self, said: Said) -> Iterable[Event]:
        """Deltas, in the blocks they belong to."""
        for part in said.parts:
            match part:
                case Reasoning(text):
                    yield from self._enter(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case Content(text):
                    yield from self._enter(Content, {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Called():
                    yield from self._leave()
                    yield self._start({**_call(part), "input": {}})
                    yield self._delta({"type": "input_json_delta", "partial_json": dump(dict(part.call.arguments))})
                    yield self._stop()

    def end(self, end: TurnEnd) -> Iterable[Event]:
        """The reason and the usage."""
        yield from self._leave()
        yield _event("message_delta", delta=_stop(end), usage=_usage(end.final.usage))
        yield _event("message_stop")

    def failed(self, error: CoordinatorError) -> Iterable[Event]:
        """One error event."""
        yield Event(error_body(error, self.request_id), "error")

    def ping(self) -> Event | None:
        """This API has an event for it."""
        return _event("ping")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}", "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _enter(self, kind: type[Reasoning] | type[Content], block: dict[str, Any]) -> Iterable[Event]:
        if self._open is not kind:
            yield from self._leave()
            self._open = kind
            yield self._start(block)

    def _leave(self) -> Iterable[Event]:
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            self._open = None
            yield self._stop()

    def _start(self, block: dict[str, Any]) -> Event:
        return _event("content_block_start", index=self._next, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._next, delta=delta)

    def _stop(self) -> Event:
        self._next += 1
        return _event("content_block_stop", index=self._next - 1)


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


def _call(called: Called) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{called.id}", "name": called.call.name}


def _stop(end: TurnEnd) -> dict[str, Any]:
    final = end.final
    if end.called:
        reason = "tool_use"
    elif final.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "max_tokens" if final.reason == lane_pb2.FINISH_REASON_LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": final.stop if reason == "stop_sequence" else None}


def _usage(usage: lane_pb2.Usage) -> dict[str, Any]:
    """What was read from a cache is not counted as input, as this API has it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **prompt_routing(usage),
    }
