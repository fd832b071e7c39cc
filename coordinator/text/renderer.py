"""A conversation in the chat format of Qwen models, as segments: special tokens by name, everything else plain text.

No template language: what a client sends only ever lands in `PlainText`, which is encoded without special tokens.
What the model's own template refuses is rendered all the same: several system turns at the beginning are one, a later
one stands where it was said, and a conversation needs no user.

Not here: tokens (tokenizer), the answer (answer_parser). Invariant: the joined segments are the text that the model's
own template gives, wherever that gives one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from coordinator.text import instructions
from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import ChatMessage, Conversation, Tool, ToolCall

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
THINK = "<think>"
THINK_END = "</think>"
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
TOOL_RESPONSE = "<tool_response>"
TOOL_RESPONSE_END = "</tool_response>"

_MARKERS = re.compile(
    "|".join(map(re.escape, (THINK, THINK_END, TOOL_CALL, TOOL_CALL_END, TOOL_RESPONSE, TOOL_RESPONSE_END)))
)


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


def render(conversation: Conversation, chat_format: ChatFormat) -> Iterator[Segment]:
    """The conversation, then the beginning of the assistant's turn."""
    messages = list(conversation.messages)
    leading = 0
    if chat_format.thinks or conversation.tools:
        leading = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    yield from _system_turn(conversation, messages[:leading], chat_format)
    rest = messages[leading:]
    last_user = max((n for n, message in enumerate(rest) if _asks(message)), default=-1)
    place = 0
    for is_tool, group in groupby(rest, key=lambda message: message.role == "tool"):
        turns = list(group)
        if is_tool:
            yield from _tool_turn(turns, chat_format)
        else:
            for number, message in enumerate(turns, place):
                keep = chat_format.thinks and (conversation.thinking.keep or number > last_user)
                yield from _turn(message.role, _body(message, keep, chat_format))
        place += len(turns)
    yield SpecialToken(IM_START)
    yield from _joined([PlainText("assistant\n"), *_opening(conversation, chat_format)])


def opens_reasoning(conversation: Conversation, chat_format: ChatFormat) -> bool:
    """Whether the prompt ends inside a reasoning block."""
    return chat_format.thinks and conversation.thinking.on


def _opening(conversation: Conversation, chat_format: ChatFormat) -> Sequence[Segment]:
    if not chat_format.thinks:
        return ()
    if conversation.thinking.on:
        return _constant(f"{THINK}\n")
    return _constant(f"{THINK}\n\n{THINK_END}\n\n")


def _asks(message: ChatMessage) -> bool:
    content = message.content.strip()
    wrapped = content.startswith(TOOL_RESPONSE) and content.endswith(TOOL_RESPONSE_END)
    return message.role == "user" and not wrapped


def _system_turn(
    conversation: Conversation, messages: Sequence[ChatMessage], chat_format: ChatFormat
) -> Iterator[Segment]:
    texts = [text for message in messages if (text := message.content.strip())]
    thinking = conversation.thinking
    effort = instructions.EFFORT[thinking.effort or "xhigh"] if chat_format.says_effort and thinking.on else ""
    parts: list[list[Segment]] = [[PlainText(effort)]] if effort else []
    if conversation.tools:
        parts.append(_tools(conversation.tools))
    parts += [[PlainText(text)] for text in texts]
    if parts:
        body = [segment for number, part in enumerate(parts) for segment in (*_gap(number), *part)]
        yield from _turn("system", body)


def _gap(number: int) -> Sequence[Segment]:
    return [PlainText("\n\n")] if number else []


def _tools(tools: Sequence[Tool]) -> list[Segment]:
    lines = "".join("\n" + _json(tool.declared) for tool in tools)
    return [PlainText(instructions.TOOLS_BEFORE + lines), *_constant(instructions.TOOLS_AFTER)]


def _body(message: ChatMessage, keep_reasoning: bool, chat_format: ChatFormat) -> list[Segment]:
    content = _trimmed(message.content, chat_format)
    body: list[Segment] = []
    if message.role == "assistant" and keep_reasoning:
        body += [Marker(THINK), PlainText(f"\n{message.reasoning.strip()}\n"), Marker(THINK_END), PlainText("\n\n")]
    body.append(PlainText(content))
    for number, call in enumerate(message.calls):
        body.append(PlainText("\n" if number else "\n\n" if content else ""))
        body += _call(call)
    return body


def _call(call: ToolCall) -> list[Segment]:
    lines = [f"\n<function={call.name}>\n"]
    for name, value in call.arguments.items():
        lines.append(f"<parameter={name}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n")
    return [Marker(TOOL_CALL), PlainText("".join(lines) + "</function>\n"), Marker(TOOL_CALL_END)]


def _turn(role: str, body: Sequence[Segment]) -> Iterator[Segment]:
    yield SpecialToken(IM_START)
    yield from _joined([PlainText(f"{role}\n"), *body])
    yield SpecialToken(IM_END)
    yield PlainText("\n")


def _tool_turn(results: Sequence[ChatMessage], chat_format: ChatFormat) -> Iterator[Segment]:
    """Consecutive results share one user turn, each between its markers."""
    body: list[Segment] = []
    for number, result in enumerate(results):
        body += [PlainText("\n")] if number else []
        body += [Marker(TOOL_RESPONSE), PlainText(f"\n{_trimmed(result.content, chat_format)}\n")]
        body.append(Marker(TOOL_RESPONSE_END))
    return _turn("user", body)


def _trimmed(content: str, chat_format: ChatFormat) -> str:
    """As the format's template writes it: the plain one keeps white space."""
    return content.strip() if chat_format.thinks else content


def _constant(text: str) -> list[Segment]:
    """Text of the format itself, whose markers are tokens."""
    found: list[Segment] = []
    place = 0
    for marker in _MARKERS.finditer(text):
        found += [PlainText(text[place : marker.start()]), Marker(marker.group())]
        place = marker.end()
    return [*found, PlainText(text[place:])]


def _joined(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Neighbouring texts as one: a tokenizer may merge across the seam, as it does in the template's text."""
    for is_text, group in groupby(segments, key=lambda segment: isinstance(segment, PlainText)):
        if is_text:
            text = "".join(segment.text for segment in group if isinstance(segment, PlainText))
            if text:
                yield PlainText(text)
        else:
            yield from group


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
