"""What is said before an answer: turns, tools, and how much the model may think. Plain values.

Not here: how a format writes them (renderer), how a client sends them (the APIs). Invariant: arguments of a call are an
object; a tool has a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "medium", "xhigh"]

# What clients call it -> what models were trained on; None: no thinking.
EFFORTS: Mapping[str, Effort | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has made."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `declared` is what the model reads, as JSON."""

    name: str
    declared: Mapping[str, Any]
    parameters: Mapping[str, Any]  # a JSON schema

    @classmethod
    def of(cls, name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
        """In the shape that models were trained on."""
        schema = parameters or {"type": "object", "properties": {}}
        function = {"name": name, **({} if description is None else {"description": description}), "parameters": schema}
        return cls(name, {"type": "function", "function": function}, schema)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Role
    content: str
    reasoning: str = ""  # of an assistant's turn
    calls: tuple[ToolCall, ...] = ()  # the same


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether and how much a model thinks before it answers."""

    on: bool = True
    effort: Effort | None = None  # None: the format's own default
    keep: bool = True  # earlier turns keep their reasoning; else only those after the last user's

    @classmethod
    def of(cls, effort: str) -> Thinking:
        """From a client's word for it; KeyError when there is no such word."""
        found = EFFORTS[effort]
        return cls(on=found is not None, effort=found)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that a prompt is made of."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    thinking: Thinking = field(default_factory=Thinking)
