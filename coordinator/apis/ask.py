"""One request for a chat answer, whatever API it came by, and what the APIs have in common to say about tools.

Not here: bodies and answers of an API, text. Invariant: types are right; values are checked by `request.check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator import limits
from coordinator.apis.json_body import parse_object
from coordinator.errors import BadRequest, OutOfRange
from coordinator.sampling import Wanted
from coordinator.text.conversation import EFFORTS, Conversation, Thinking, Tool
from coordinator.text.grammar import Bound


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """What is asked of the model, and how the answer is to be sent."""

    model: str | None
    conversation: Conversation
    wanted: Wanted
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    stop_ids_param: str = "stop_token_ids"
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    top_logprobs_param: str = "top_logprobs"
    stream: bool = False
    include_usage: bool = False
    calls: bool = True  # what looks like a call is one
    parallel: bool = True  # more than one call
    bound: Bound | None = None  # what the answer must be
    session_hint: str | None = None  # of the body, for clients that send no header


def check_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """Their number and names are in bounds, and each has its own."""
    for place, tool in enumerate(tools):
        if not tool.name or len(tool.name) > limits.TOOL_NAME_CHARS or not set(tool.name).isdisjoint(">\n\r<\0"):
            raise OutOfRange(
                f"a tool's name has 1 to {limits.TOOL_NAME_CHARS} characters on one line", param=f"{param}.{place}.name"
            )
    if len({tool.name for tool in tools}) != len(tools):
        raise BadRequest("two tools have one name", param=param)
    return tuple(tools)


def parse_arguments(arguments: str, param: str) -> Mapping[str, Any]:
    """Of a call in the history, as JSON text."""
    return parse_object(arguments, param) if arguments.strip() else {}


def parse_bound(
    schema: Any, schema_param: str, tools: Sequence[Tool], must: bool, name: str | None, choice_param: str
) -> Bound | None:
    """What the answer must be: a call (of the tool of that name), else JSON of the schema, else anything (None)."""
    if not must:
        if schema is None:
            return None
        if not isinstance(schema, dict):
            raise BadRequest("a schema is an object", param=schema_param)
        return Bound(schema_param, schema)
    names = tuple(tool.name for tool in tools if name in (None, tool.name))
    if not names:
        raise BadRequest("there is no such tool" if tools else "needs tools", param=choice_param)
    return Bound(choice_param, must_call=names)


def parse_effort(word: str | None, param: str) -> Thinking:
    """A client's word for how much to think."""
    if word is None:
        return Thinking()
    try:
        return Thinking.of(word)
    except KeyError:
        raise OutOfRange(f"{param} is one of {', '.join(EFFORTS)}", param=param) from None
