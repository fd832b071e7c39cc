"""A conversation in the ChatML of Qwen models, as segments: special tokens by name, everything else as plain text.

No template language: what a client sends only ever lands in `PlainText`, which is encoded without special tokens.
Consecutive tool results share one user turn, each between its markers, as the models were trained.

Not here: tokens (tokenizer), tool calls and reasoning. Invariant: the joined segments are the text that the model's own
template gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
TOOL_RESPONSE = "<tool_response>"
TOOL_RESPONSE_END = "</tool_response>"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token of the format; without it in the tokenizer there is no such format."""

    name: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A token of the format where the tokenizer has it, else the same text."""

    name: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text, whatever it looks like."""

    text: str


Segment = SpecialToken | Marker | PlainText


def render(messages: Sequence[ChatMessage]) -> Iterator[Segment]:
    """The conversation, then the beginning of the assistant's turn."""
    for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            yield from _tool_turn(list(group))
        else:
            for message in group:
                yield from _turn(message.role, [PlainText(message.content)])
    yield SpecialToken(IM_START)
    yield PlainText("assistant\n")


def _turn(role: str, body: Sequence[Segment]) -> Iterator[Segment]:
    yield SpecialToken(IM_START)
    yield from _joined([PlainText(f"{role}\n"), *body])
    yield SpecialToken(IM_END)
    yield PlainText("\n")


def _tool_turn(results: Sequence[ChatMessage]) -> Iterator[Segment]:
    body: list[Segment] = []
    for number, result in enumerate(results):
        body += [PlainText("\n")] if number else []
        body += [Marker(TOOL_RESPONSE), PlainText(f"\n{result.content}\n"), Marker(TOOL_RESPONSE_END)]
    return _turn("user", body)


def _joined(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbouring texts as one: a tokenizer may merge across the seam, as it does in the template's text."""
    for is_text, group in groupby(segments, key=lambda segment: isinstance(segment, PlainText)):
        if is_text:
            yield PlainText("".join(segment.text for segment in group if isinstance(segment, PlainText)))
        else:
            yield from group
