"""What clients of /v1/responses get: a response of items, whole or as numbered events.

    response.created  response.in_progress  (output_item.added  …deltas…  output_item.done)…  response.completed

Not here: HTTP. Invariants: events are numbered from 0; one item is open at a time, and each that was added is done; the
last event carries the response that the whole answer would have been, items in the order they were written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.apis.approximate import prompt_routing
from coordinator.apis.openai.responses import pack_reasoning
from coordinator.apis.writer import Event, dump
from coordinator.chat import Called, Said, Turn, TurnEnd
from coordinator.errors import CoordinatorError
from coordinator.text.answer_parser import Content, Reasoning
from laneproto.v1 import lane_pb2


@dataclass(slots=True)
class ResponseWriter:
    """One answer."""

    request_id: str
    model: str
    created: int  # seconds since 1970
    echoed: dict[str, Any]  # what the response says of its request
    free_form: frozenset[str] = frozenset()  # tools that take a text
    packs_reasoning: bool = False
    _items: list[dict[str, Any]] = field(default_factory=list)
    _open: str | None = None  # text of the item that is being written
    _sequence: int = 0

    def whole(self, turn: Turn, end: TurnEnd) -> dict[str, Any]:
        """The response in one body."""
        items = [self._reasoning(turn.reasoning)] if turn.reasoning else []
        if turn.content:
            self._items = items
            items.append(self._message(turn.content))
        items += [self._call(called) for called in turn.calls]
        self._items = items
        return self._ended(end)

    def begin(self) -> Iterable[Event]:
        """The response, still empty."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def said(self, said: Said) -> Iterable[Event]:
        """Deltas, in the items they belong to."""
        for part in said.parts:
            match part:
                case Reasoning(text):
                    yield from self._enter("reasoning")
                    yield self._delta("response.reasoning_text.delta", text)
                case Content(text):
                    yield from self._enter("message")
                    yield self._delta("response.output_text.delta", text, logprobs=[])
                case Called():
                    yield from self._leave()
                    yield from self._called(part)

    def end(self, end: TurnEnd) -> Iterable[Event]:
        """The whole response."""
        yield from self._leave()
        response = self._ended(end)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: CoordinatorError) -> Iterable[Event]:
        """The response as far as it came."""
        response = self._response("failed", error={"code": error.code, "message": error.message})
        yield self._event("response.failed", response=response)

    def ping(self) -> Event | None:
        """A comment will do."""
        return None

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sequence = self._sequence, self._sequence + 1
        return Event({"type": kind, "sequence_number": number, **fields}, kind)

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._open = (self._open or "") + text
        return self._about(kind, content_index=0, delta=text, **fields)

    def _about(self, kind: str, **fields: Any) -> Event:
        """An event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _enter(self, kind: str) -> Iterable[Event]:
        if self._open is not None and self._items[-1]["type"] == kind:
            return
        yield from self._leave()
        item = self._reasoning("") if kind == "reasoning" else self._message("")
        self._items.append(item)
        self._open = ""
        yield self._item_event("response.output_item.added", {**item, "content": [], "status": "in_progress"})
        if kind == "message":
            yield self._about("response.content_part.added", content_index=0, part=_output_text(""))

    def _leave(self) -> Iterable[Event]:
        if self._open is None:
            return
        text, self._open = self._open, None
        opened = self._items.pop()
        done = self._reasoning(text) if opened["type"] == "reasoning" else self._message(text)
        self._items.append(done)
        if done["type"] == "reasoning":
            yield self._about("response.reasoning_text.done", content_index=0, text=text)
        else:
            yield self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._about("response.content_part.done", content_index=0, part=_output_text(text))
        yield self._item_event("response.output_item.done", done)

    def _called(self, called: Called) -> Iterable[Event]:
        item = self._call(called)
        self._items.append(item)
        name, kind = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            name, kind = "input", "response.custom_tool_call_input"
        yield self._item_event("response.output_item.added", {**item, name: "", "status": "in_progress"})
        yield self._about(f"{kind}.delta", delta=item[name])
        yield self._about(f"{kind}.done", **{name: item[name]}, name=item["name"])
        yield self._item_event("response.output_item.done", item)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.request_id}{len(self._items):02d}"

    def _reasoning(self, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": self._id("rs"), "type": "reasoning", "summary": [],
            "content": [{"type": "reasoning_text", "text": text}], "status": "completed",
        }  # fmt: skip
        return {**item, "encrypted_content": pack_reasoning(text)} if self.packs_reasoning else item

    def _message(self, text: str) -> dict[str, Any]:
        return {
            "id": self._id("msg"), "type": "message", "role": "assistant", "status": "completed",
            "content": [_output_text(text)],
        }  # fmt: skip

    def _call(self, called: Called) -> dict[str, Any]:
        call = called.call
        item = {"call_id": f"call_{called.id}", "name": call.name, "status": "completed"}
        if call.name in self.free_form:
            text = call.arguments.get("input")
            asked = text if isinstance(text, str) else dump(dict(call.arguments))
            return {"id": f"ctc_{called.id}", "type": "custom_tool_call", **item, "input": asked}
        return {"id": f"fc_{called.id}", "type": "function_call", **item, "arguments": dump(dict(call.arguments))}

    def _ended(self, end: TurnEnd) -> dict[str, Any]:
        usage = end.final.usage
        cut = end.final.reason == lane_pb2.FINISH_REASON_LENGTH
        return self._response(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                **prompt_routing(usage),
            },
        )

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": f"resp_{self.request_id}", "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": list(self._items), "error": None, "incomplete_details": None,
            "usage": None, **self.echoed, **fields,
        }  # fmt: skip


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
