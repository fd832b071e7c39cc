"""The chat form of the gRPC door: `serve.proto`'s Chat as an ask, and what was said as its deltas.

Not here: calls and streams (doors.grpc). Invariant: what a delta says can be sent back as a message of the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from coordinator import limits
from coordinator.apis.ask import ChatAsk, check_tools, parse_arguments, parse_bound, parse_effort
from coordinator.apis.json_body import parse_object
from coordinator.apis.writer import dump
from coordinator.chat import Called, Said
from coordinator.errors import BadRequest, OutOfRange
from coordinator.sampling import Wanted
from coordinator.text.answer_parser import Content, Reasoning
from coordinator.text.conversation import ChatMessage, Conversation, Role, Tool, ToolCall
from laneproto.v1 import serve_pb2

_ROLES: tuple[str, ...] = get_args(Role)


def parse_grpc_chat(request: serve_pb2.GenerateRequest, wanted: Wanted) -> ChatAsk:
    """What is asked. Raises `RequestError`, which names the field."""
    chat = request.chat
    for name, count, most in (
        ("messages", len(chat.messages), limits.MESSAGES),
        ("tools", len(chat.tools), limits.TOOLS),
    ):
        if count > most:
            raise OutOfRange(f"at most {most} {name}", param=f"chat.{name}")
    if not chat.messages:
        raise BadRequest("at least one message is required", param="chat.messages")
    untold = chat.tool_use == serve_pb2.TOOL_USE_NONE
    tools = () if untold else check_tools([_tool(tool, place) for place, tool in enumerate(chat.tools)], "chat.tools")
    must = chat.tool_use == serve_pb2.TOOL_USE_REQUIRED
    if chat.tool_name and not must:
        raise BadRequest("tool_name needs TOOL_USE_REQUIRED", param="chat.tool_name")
    schema = parse_object(chat.answer_schema, "chat.answer_schema") if chat.answer_schema else None
    messages = [_message(message, f"chat.messages.{place}") for place, message in enumerate(chat.messages)]
    thinking = parse_effort(chat.reasoning_effort or None, "chat.reasoning_effort")
    return ChatAsk(
        model=None,
        conversation=Conversation(messages, tools, thinking),
        wanted=wanted,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stops=tuple(request.stop),
        stop_ids=tuple(request.stop_ids),
        stop_ids_param="stop_ids",
        ignore_eos=request.ignore_eos,
        logprobs=request.HasField("logprobs"),
        top_logprobs=request.logprobs,
        top_logprobs_param="logprobs",
        parallel=chat.parallel_calls or not chat.HasField("parallel_calls"),
        bound=parse_bound(schema, "chat.answer_schema", tools, must, chat.tool_name or None, "chat.tool_use"),
    )


def said_delta(said: Said) -> serve_pb2.Delta:
    """Some more of the turn."""
    delta = serve_pb2.Delta(tokens=[entry.token for entry in said.tokens])
    for part in said.parts:
        match part:
            case Reasoning(text):
                delta.reasoning += text
            case Content(text):
                delta.text += text
            case Called():
                delta.calls.add(id=f"call_{part.id}", name=part.call.name, arguments=dump(dict(part.call.arguments)))
    return delta


def _message(message: serve_pb2.ChatMessage, where: str) -> ChatMessage:
    if message.role not in _ROLES:
        raise OutOfRange(f"a role is one of {', '.join(_ROLES)}", param=f"{where}.role")
    if message.role != "assistant" and (message.calls or message.reasoning):
        raise BadRequest("only an assistant reasons and calls tools", param=where)
    calls = tuple(_call(call, f"{where}.calls.{number}") for number, call in enumerate(message.calls))
    return ChatMessage(cast(Role, message.role), message.content, message.reasoning, calls)


def _call(call: serve_pb2.ChatCall, where: str) -> ToolCall:
    if not call.name:
        raise BadRequest("name is required", param=f"{where}.name")
    return ToolCall(call.name, parse_arguments(call.arguments, f"{where}.arguments"))


def _tool(tool: serve_pb2.ChatTool, place: int) -> Tool:
    parameters: Mapping[str, Any] | None = None
    if tool.parameters:
        parameters = parse_object(tool.parameters, f"chat.tools.{place}.parameters")
    return Tool.of(tool.name, tool.description or None, parameters)
