"""What a model writes, as it comes, taken apart: reasoning, the answer's text, calls of tools.

    START ── "<think>" ──▶ REASONING ── "</think>" ──▶ GAP ──▶ CONTENT
      └───────────────────────▶ CONTENT ── "<tool_call>" ──▶ CALL ── its end ──▶ GAP

Models do not always write what they were taught; each of these has one outcome:
- an answer that ends inside its reasoning is reasoning alone;
- a whole call inside the reasoning is a call, and ends the reasoning; anything less stays reasoning;
- a call without its opening marker, or without `</function>`, is a call;
- what was to be a call and cannot be read (no name, arguments that are not JSON, cut off) is text, as it was written;
- a name that was not offered is a call all the same: its caller knows what to answer.

Not here: tokens and stop strings, wire formats. Invariants, whatever the pieces the text comes in: the same parts;
white space between parts belongs to none; nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.text.conversation import Tool, ToolCall
from coordinator.text.renderer import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from coordinator.text.tool_syntax import FUNCTION, FUNCTION_END, call_end, parse_call


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some more of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some more of the answer."""

    text: str


Part = Reasoning | Content | ToolCall


class _State(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()  # between two parts
    CONTENT = auto()
    CALL = auto()


class AnswerParser:
    """One answer. `tools`: those that were offered, by name; None: calls are text. `thinks`: `<think>` may begin it."""

    def __init__(self, tools: Mapping[str, Tool] | None, *, in_reasoning: bool, thinks: bool) -> None:
        self._tools = tools
        self._state = _State.REASONING if in_reasoning else _State.START if thinks else _State.CONTENT
        self._held = ""  # not yet given out; in CALL everything from its opening marker on
        self._scanned = 0  # of a call: how much of it holds no end
        self._called_in_reasoning = False
        self._lead = ""  # white space before what may be a call
        self._begun = False  # whether the reasoning has any text
        self._parts: list[Part] = []
        self._fed = 0  # characters
        self._reasoned = 0  # of these, up to the end of the reasoning, its marker included; 0 before that

    def feed(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        self._held += text
        self._fed += len(text)
        return self._advance(final=False)

    def flush(self) -> list[Part]:
        """The answer is over: what was held back."""
        return self._advance(final=True)

    @property
    def reasoned(self) -> int:
        """How many characters of the answer so far are reasoning, its marker among them."""
        inside = self._state is _State.REASONING or (self._state is _State.CALL and self._called_in_reasoning)
        return self._fed if inside else self._reasoned

    def _advance(self, *, final: bool) -> list[Part]:
        while self._step(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _step(self, final: bool) -> bool:
        """Whether the state changed, so that there may be more to do."""
        match self._state:
            case _State.START:
                return self._start(final)
            case _State.REASONING:
                return self._reasoning(final)
            case _State.GAP:
                return self._gap(final)
            case _State.CONTENT:
                return self._content(final)
            case _State.CALL:
                return self._call(final)

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._state = _State.REASONING
        elif THINK.startswith(text) and not final:
            return False
        else:
            self._state = _State.CONTENT
        return True

    def _reasoning(self, final: bool) -> bool:
        markers = (THINK_END, TOOL_CALL) if self._tools else (THINK_END,)
        begin, marker = _first(self._held, markers)
        if marker == THINK_END:
            self._say(Reasoning, self._held[:begin].rstrip())
            self._held = self._held[begin + len(marker) :]
            self._reasoned = self._fed - len(self._held)
            self._state = _State.GAP
            return True
        if marker:
            self._open_call(Reasoning, begin, in_reasoning=True)
            return True
        keep = len(self._held.rstrip()) if final else _safe(self._held, markers)
        self._say(Reasoning, self._held[:keep])
        self._held = "" if final else self._held[keep:]
        return False

    def _gap(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if self._tools and self._held.startswith(TOOL_CALL_END):  # of a call that had ended before it
            self._held = self._held[len(TOOL_CALL_END) :]
            return True
        if not self._held or (self._tools and not final and TOOL_CALL_END.startswith(self._held)):
            return False
        self._state = _State.CONTENT
        return True

    def _content(self, final: bool) -> bool:
        if not self._tools:
            self._say(Content, self._held)
            self._held = ""
            return False
        markers = (TOOL_CALL, FUNCTION)
        begin, marker = _first(self._held, markers)
        if marker:
            self._open_call(Content, begin, in_reasoning=False)
            return True
        keep = len(self._held) if final else _safe(self._held, markers)
        self._say(Content, self._held[:keep])
        self._held = self._held[keep:]
        return False

    def _open_call(self, kind: type[Reasoning] | type[Content], begin: int, *, in_reasoning: bool) -> None:
        before = self._held[:begin]
        # white space stays with the call until it is one
        kept = before.rstrip()
        self._say(kind, kept)
        self._lead = before[len(kept) :]
        self._held = self._held[begin:]
        self._called_in_reasoning = in_reasoning
        self._scanned = 0
        self._state = _State.CALL

    def _call(self, final: bool) -> bool:
        opened = len(TOOL_CALL) if self._held.startswith(TOOL_CALL) else 0
        end = call_end(self._held, opened, self._scanned, final=final)
        if self._called_in_reasoning and THINK_END in self._held[:end]:
            return self._not_a_call(opened)
        if end is None:
            self._scanned = max(opened, len(self._held) - len(TOOL_CALL_END) - len(FUNCTION_END))
            return self._not_a_call(opened or len(FUNCTION)) if final else False
        call = parse_call(self._held[opened:end].removesuffix(TOOL_CALL_END), self._tools or {})
        if call is None:
            return self._not_a_call(end)
        self._parts.append(call)
        if self._called_in_reasoning:
            self._reasoned = self._fed - len(self._held)
        self._held = self._held[end:]
        self._state = _State.GAP
        return True

    def _not_a_call(self, length: int) -> bool:
        """The first `length` characters are text; what follows is looked at again."""
        kind = Reasoning if self._called_in_reasoning else Content
        self._say(kind, self._lead + self._held[:length])
        self._held = self._held[length:]
        self._state = _State.REASONING if self._called_in_reasoning else _State.CONTENT
        return True

    def _say(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if kind is Reasoning and not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if not text:
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """The marker that comes first, and where; ("" when there is none)."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def _safe(text: str, markers: tuple[str, ...]) -> int:
    """How much can be given out: no white space at the end, and nothing that may become a marker."""
    keep = len(text)
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:size]):
                keep = min(keep, len(text) - size)
                break
    return len(text[:keep].rstrip())
