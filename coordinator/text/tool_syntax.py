"""One call of a tool as models write it: with tags for name and parameters, or as a JSON object.

    <function=NAME>                            {"name": NAME, "arguments": {…}}
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

Not here: streams (answer_parser). Invariant: what is returned has a name and an object of arguments; a tagged value is
of the type that the tool's schema gives it where it can be read as that, else a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from coordinator.text.conversation import Tool, ToolCall
from coordinator.text.renderer import TOOL_CALL_END

FUNCTION = "<function="
FUNCTION_END = "</function>"
_NAME = re.compile(r"\s*<function=([^>\n]+)>")
# a value ends where a tag follows that can follow: it may hold the text of such tags itself
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|\Z))", re.DOTALL)
_ENDS = re.compile(f"{FUNCTION_END}|{TOOL_CALL_END}")
_QUOTES = re.compile(r'\\.|"', re.DOTALL)


def call_end(text: str, begin: int, scanned: int, *, final: bool) -> int | None:
    """Where the call ends whose body begins at `begin`; None while it may go on. `scanned`: no end before that."""
    if text.startswith(FUNCTION, begin) or text[begin : begin + 256].lstrip().startswith(FUNCTION):
        return _tagged_end(text, begin, scanned, final)
    return _json_end(text, begin, scanned)


def parse_call(body: str, tools: Mapping[str, Tool]) -> ToolCall | None:
    """The call, or None when it cannot be read."""
    text = body.strip()
    if text.startswith("{"):
        return _parse_json(text)
    named = _NAME.match(text)
    if named is None:
        return None
    name = named.group(1).strip()
    rest = text[named.end() :].removesuffix(FUNCTION_END)
    found = list(_PARAMETER.finditer(rest))
    if "".join(_PARAMETER.split(rest)[::3]).strip():  # what is between parameters
        return None
    tool = tools.get(name)
    kinds = tool.parameters.get("properties") if tool else None
    known = kinds if isinstance(kinds, dict) else {}
    arguments = {match.group(1): _typed(match.group(2), known.get(match.group(1))) for match in found}
    return ToolCall(name, arguments)


def _tagged_end(text: str, begin: int, scanned: int, final: bool) -> int | None:
    for found in _ENDS.finditer(text, max(begin, scanned)):
        if _inside_value(text, begin, found.start()):
            continue
        if found.group() == TOOL_CALL_END:  # its own end was forgotten
            return found.end()
        after = text[found.end() :].lstrip()
        if after.startswith(TOOL_CALL_END):
            return len(text) - len(after) + len(TOOL_CALL_END)
        return found.end() if final or (after and not TOOL_CALL_END.startswith(after)) else None
    return None


def _inside_value(text: str, begin: int, place: int) -> bool:
    """Whether a parameter is open there."""
    return text.rfind("<parameter=", begin, place) > text.rfind("</parameter>", begin, place)


def _json_end(text: str, begin: int, scanned: int) -> int | None:
    place = text.find(TOOL_CALL_END, max(begin, scanned))
    while place >= 0:
        if not _inside_string(text, begin, place):
            return place + len(TOOL_CALL_END)
        place = text.find(TOOL_CALL_END, place + 1)
    return None


def _inside_string(text: str, begin: int, place: int) -> bool:
    """Whether a JSON string is open there."""
    return sum(found.group() == '"' for found in _QUOTES.finditer(text, begin, place)) % 2 == 1


def _parse_json(text: str) -> ToolCall | None:
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)  # line breaks in strings are common
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _typed(value: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return value
    try:
        found = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        low = value.strip().lower()
        return low == "true" if "boolean" in kinds and low in ("true", "false") else value
    if "string" in kinds and (isinstance(found, str) or not kinds & _kind_of(found)):
        return value
    return found


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options[:16] if isinstance(options, list) else ():
            if isinstance(option, dict) and isinstance(option.get("type"), str):
                kinds.add(option["type"])
    return kinds


def _kind_of(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _refuse(constant: str) -> None:
    raise ValueError(constant)
