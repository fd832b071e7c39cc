"""The body of /v1/responses: items of a conversation, tools, and how to answer. Nothing is stored between requests.

Tools that a server would have to run are left out, so the model never hears of them. A free-form tool is a function
with one argument, `input`. Reasoning comes back as it was sent: in the item's content, or packed in
`encrypted_content`, which is what clients that keep nothing else send back.

Not here: what is answered (responses_answers).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from coordinator import limits
from coordinator.apis.ask import ChatAsk, check_tools, parse_arguments, parse_bound, parse_effort
from coordinator.apis.json_body import List, Strict, check_length, parse_body, refuse_unsupported
from coordinator.errors import BadRequest, OutOfRange, Unsupported
from coordinator.sampling import Wanted
from coordinator.text.conversation import ChatMessage, Conversation, Role, Tool, ToolCall

_PACKED = "plain:"  # says that nothing is encrypted
_TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_REFUSALS: dict[str, tuple[object, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
}


class Part(Strict):
    """Content in parts: only text."""

    type: str
    text: str | None = None


class Item(Strict):
    """An item of any type; which fields it has depends on that."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | List[Part] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | List[Part] | None = None
    encrypted_content: str | None = None


class ResponsesTool(Strict):
    """A tool; only functions and free-form ones are the client's own."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesNamedTool(Strict):
    """The one tool to call."""

    type: str
    name: str | None = None


class ReasoningOptions(Strict):
    """How much to think."""

    effort: str | None = None


class TextFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Strict):
    """How the text is to look."""

    format: TextFormat | None = None


class ResponsesBody(Strict):
    """POST /v1/responses."""

    model: str | None = None
    input: str | List[Item]
    instructions: str | None = None
    tools: List[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    prompt_cache_key: str | None = None
    include: List[str] | None = None
    metadata: dict[str, Any] | None = None

    def ask(self) -> ChatAsk:
        """What is asked."""
        tools = () if self.tool_choice == "none" else self.own_tools()
        named = (self.tool_choice.name or "") if isinstance(self.tool_choice, ResponsesNamedTool) else None
        must = named is not None or self.tool_choice == "required"
        messages = self._messages()
        if not messages:
            raise BadRequest("input is empty", param="input")
        return ChatAsk(
            model=self.model,
            conversation=Conversation(
                messages,
                tools,
                parse_effort(self.reasoning.effort if self.reasoning else None, "reasoning.effort"),
            ),
            wanted=Wanted(temperature=self.temperature, top_p=self.top_p),
            max_tokens=(
                limits.DEFAULT_MAX_TOKENS_RESPONSES if self.max_output_tokens is None else self.max_output_tokens
            ),
            max_tokens_param="max_output_tokens",
            stream=bool(self.stream),
            parallel=self.parallel_tool_calls is not False,
            bound=parse_bound(self._schema(), "text.format", tools, must, named, "tool_choice"),
            session_hint=self.prompt_cache_key,
        )

    @property
    def packs_reasoning(self) -> bool:
        """Whether the client wants reasoning in a form to keep."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def free_form(self) -> frozenset[str]:
        """Tools that take a text instead of an object."""
        return frozenset(tool.name for tool in self.tools or () if tool.type == "custom" and tool.name)

    def own_tools(self) -> tuple[Tool, ...]:
        """The client's own."""
        return check_tools(
            [
                Tool.of(tool.name or "", tool.description, tool.parameters if tool.type == "function" else _INPUT)
                for tool in self.tools or ()
                if tool.type in ("function", "custom")
            ]
        )

    def _schema(self) -> Any:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.schema_ is None:
            raise BadRequest("a schema is required", param="text.format.schema")
        return wanted.schema_

    def _messages(self) -> list[ChatMessage]:
        gathered = _Gathered()
        if self.instructions:
            gathered.messages.append(ChatMessage("system", self.instructions))
        if isinstance(self.input, str):
            gathered.messages.append(ChatMessage("user", self.input))
        else:
            for number, item in enumerate(self.input):
                gathered.add(item, f"input.{number}")
        gathered.close()
        return gathered.messages


@dataclass(slots=True)
class _Gathered:
    """Items become turns: reasoning, text and calls that follow each other are one turn of the assistant."""

    messages: list[ChatMessage] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, item: Item, where: str) -> None:
        match item.type or "message":
            case "message" if item.role == "assistant":
                if self.calls:
                    self.close()
                self.texts.append(_text(item.content, f"{where}.content"))
            case "message":
                self.close()
                role: Role = "user" if item.role == "user" else "system"
                self.messages.append(ChatMessage(role, _text(item.content, f"{where}.content")))
            case "reasoning":
                if self.calls or self.texts:
                    self.close()
                self.reasoning.append(_reasoning(item, where))
            case "function_call":
                arguments = parse_arguments(item.arguments or "", f"{where}.arguments")
                self.calls.append(ToolCall(_name(item, where), arguments))
            case "custom_tool_call":
                self.calls.append(ToolCall(_name(item, where), {"input": item.input or ""}))
            case "function_call_output" | "custom_tool_call_output":
                self.close()
                self.messages.append(ChatMessage("tool", _text(item.output, f"{where}.output")))
            case _:
                raise Unsupported("items of this type are not supported", param=f"{where}.type")

    def close(self) -> None:
        """The assistant's turn is over."""
        if self.reasoning or self.texts or self.calls:
            self.messages.append(
                ChatMessage("assistant", "\n".join(self.texts), "\n".join(self.reasoning), tuple(self.calls))
            )
        self.reasoning, self.texts, self.calls = [], [], []


def parse_responses(value: dict[str, Any]) -> tuple[ResponsesBody, ChatAsk]:
    """The body of /v1/responses, and what it asks."""
    refuse_unsupported(value, _REFUSALS)
    items = value.get("input")
    if isinstance(items, list) and len(items) > limits.MESSAGES:  # before they are looked at
        raise OutOfRange(f"at most {limits.MESSAGES} items", param="input")
    check_length(value, "tools", limits.TOOLS)
    body = parse_body(ResponsesBody, value)
    return body, body.ask()


def pack_reasoning(text: str) -> str:
    """Reasoning in a form that a client keeps and sends back unread."""
    return _PACKED + base64.b64encode(text.encode()).decode()


def _reasoning(item: Item, where: str) -> str:
    text = _text(item.content, f"{where}.content")
    packed = item.encrypted_content or ""
    if text or not packed.startswith(_PACKED):  # another server's secret says nothing to us
        return text
    try:
        return base64.b64decode(packed.removeprefix(_PACKED), validate=True).decode()
    except (binascii.Error, ValueError):
        raise BadRequest("encrypted_content is not what was sent", param=f"{where}.encrypted_content") from None


def _text(content: str | Sequence[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in _TEXTS or part.text is None:
            raise Unsupported("only text parts are supported", param=f"{where}.{number}.type")
        texts.append(part.text)
    return "\n".join(texts)


def _name(item: Item, where: str) -> str:
    if not item.name:
        raise BadRequest("name is required", param=f"{where}.name")
    return item.name
