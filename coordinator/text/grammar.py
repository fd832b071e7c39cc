"""What an answer is bound to be, written as a grammar that lanes keep: JSON of a schema, or a call of a tool.

    start: thought? answer          thought: anything up to the token that ends the reasoning
    answer: json | call+            call: the markers of a call around {"name": …, "arguments": JSON of its schema}

The grammar is Lark as llguidance reads it, and is compiled once here, so that a schema which cannot be kept is the
client's error and never a lane's.

Not here: masks (the lane). Invariant: nothing of a client's stands in a grammar but as a JSON string or behind %json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from coordinator import limits
from coordinator.errors import BadRequest, OutOfRange
from coordinator.text.conversation import Tool
from coordinator.text.renderer import THINK_END, TOOL_CALL, TOOL_CALL_END
from coordinator.text.schema_bounds import check_schema
from coordinator.text.tokenizer import Tokenizer

# Some models go on with white space for ever where they may. What a client says under this name is not asked for.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"\n?[ ]{0,16}"}


@dataclass(frozen=True, slots=True)
class Bound:
    """What was asked for. Without a schema, the answer is calls of the tools that `must_call` names."""

    param: str  # of the field that says so
    schema: Mapping[str, Any] | None = None
    must_call: tuple[str, ...] = ()


def write_grammar(
    bound: Bound, tools: Sequence[Tool], tokenizer: Tokenizer, *, in_reasoning: bool, parallel: bool
) -> str:
    """The grammar; a `RequestError` when there is none that can be kept."""
    rules: list[str] = []
    kinds: list[str] = []
    if bound.schema is not None:
        check_schema(bound.schema, bound.param)
        kinds.append("json")
        rules.append(f"json: %json {_schema(bound.schema)}")
    callable_tools = [tool for tool in tools if not bound.must_call or tool.name in bound.must_call]
    for tool in callable_tools:
        check_schema(tool.parameters or {}, bound.param)
    if callable_tools:
        kinds.append("calls")
        rules += _calls(callable_tools, tokenizer, parallel=parallel)
    thought = f"/(.|\\n)*/ {_marker(THINK_END, tokenizer)} /[ \\n]{{0,2}}/ " if in_reasoning else ""
    grammar = "\n".join([f"start: {thought}answer", f"answer: {' | '.join(kinds)}", *rules])
    if len(grammar.encode()) > limits.GRAMMAR_BYTES:
        raise OutOfRange(f"schemas have at most {limits.GRAMMAR_BYTES} bytes", param=bound.param)
    if LLMatcher.validate_grammar(grammar, limits=LLParserLimits(max_grammar_size=limits.GRAMMAR_SYMBOLS)):
        raise BadRequest("the schema cannot be kept: it is no JSON schema, or too complex", param=bound.param)
    return grammar


def _calls(tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool) -> list[str]:
    begin, end = _marker(TOOL_CALL, tokenizer), _marker(TOOL_CALL_END, tokenizer)
    any_call = " | ".join(f"call_{number}" for number in range(len(tools)))
    rules = [
        "calls: call (/\\n?/ call)*" if parallel else "calls: call",
        f"call: {begin} /\\n/ ({any_call}) /\\n/ {end}",
    ]
    for number, tool in enumerate(tools):
        opening = _json(f'{{"name": {_json(tool.name)}, "arguments": ')
        rules += [
            f'call_{number}: {opening} arguments_{number} "}}"',
            f"arguments_{number}: %json {_schema(tool.parameters or {'type': 'object'})}",
        ]
    return rules


def _marker(name: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.special(name)
    return _json(name) if token is None else f"<[{token}]>"


def _schema(schema: Mapping[str, Any]) -> str:
    return _json({**schema, "x-guidance": _OPTIONS})


def _json(value: object) -> str:
    return json.dumps(value)
