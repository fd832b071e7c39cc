"""Chats through the gRPC door: a thinking model's turns with tools, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator import limits
from laneproto.v1 import lane_pb2, serve_pb2
from laneproto.v1.serve_pb2 import Chat, ChatCall, ChatMessage, ChatTool
from tests.contract.test_chat_turns import TURN
from tests.fakes.doors import Cluster, open_doors, spelt, thinking_dir
from tests.fakes.lane import Script

HELLO = ChatMessage(role="user", content="Hello")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
READ = ChatTool(name="read", description="Reads.", parameters=json.dumps(SCHEMA))


def thinking(tmp_path: Path, text: str, **options: Any) -> Any:
    script = Script(tokens=spelt(text))
    return open_doors(tmp_path, lanes=1, script=script, text_from=thinking_dir(), **options)


async def refusal(cluster: Cluster, **fields: Any) -> tuple[str, list[str]]:
    """The code, and the fields that are to blame."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(**fields)
    status = rpc_status.from_call(caught.value)
    info, wrong = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        assert detail.Unpack(info) or detail.Unpack(wrong)
    return info.reason, [violation.field for violation in wrong.field_violations]


async def test_a_turn_with_reasoning_text_and_calls(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        events = await cluster.generate(chat=Chat(messages=[HELLO], tools=[READ]), logprobs=0)
        deltas = [event.delta for event in events[1:-1]]
        assert events[0].started.prompt_tokens == len(cluster.lanes[0].requests[0].prompt_ids)
        assert "".join(delta.reasoning for delta in deltas) == "I think."
        assert "".join(delta.text for delta in deltas) == "Let me look."
        calls = [call for delta in deltas for call in delta.calls]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("read", {"path": "/ä", "lines": 7}), ("read", {"path": "/b", "lines": 7}),
        ]  # fmt: skip
        assert len({call.id for call in calls}) == 2
        assert [token.id for delta in deltas for token in delta.tokens] == list(spelt(TURN))[:-1]
        finished = events[-1].finished
        assert finished.reason == lane_pb2.FINISH_REASON_STOP
        assert finished.usage.completion_tokens == len(spelt(TURN))
        assert cluster.lanes[0].requests[0].sampling.temperature == 0.0


async def test_the_same_prompt_as_over_http_and_the_turn_can_be_sent_back(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        events = await cluster.generate(chat=Chat(messages=[HELLO], tools=[READ]))
        declared = {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [declared]}
        await cluster.post("/v1/chat/completions", body)
        first, second = (list(asked.prompt_ids) for asked in cluster.lanes[0].requests)
        assert first == second
        turn = ChatMessage(role="assistant")
        for event in events:
            turn.content += event.delta.text
            turn.reasoning += event.delta.reasoning
            turn.calls.extend(event.delta.calls)
        found = ChatMessage(role="tool", content="found")
        await cluster.generate(chat=Chat(messages=[HELLO, turn, found, found], tools=[READ]))
        text = cluster.doors.serving.text
        said = "".join(map(text.token_text, [*first, *spelt(TURN)]))
        assert "".join(map(text.token_text, cluster.lanes[0].requests[-1].prompt_ids)).startswith(said)


async def test_one_call_no_tools_and_no_thinking(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        one = await cluster.generate(chat=Chat(messages=[HELLO], tools=[READ], parallel_calls=False))
        assert sum(len(event.delta.calls) for event in one) == 1
        none = await cluster.generate(
            chat=Chat(messages=[HELLO], tools=[READ], tool_use=serve_pb2.TOOL_USE_NONE, reasoning_effort="none")
        )
        assert not any(event.delta.calls or event.delta.reasoning for event in none)
        assert "<tool_call>" in "".join(event.delta.text for event in none)


async def test_bound_answers_reach_the_lane_as_grammars(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        await cluster.generate(chat=Chat(messages=[HELLO], answer_schema=json.dumps(SCHEMA)))
        required = serve_pb2.TOOL_USE_REQUIRED
        await cluster.generate(chat=Chat(messages=[HELLO], tools=[READ], tool_use=required, tool_name="read"))
        schema, call = (asked.grammar for asked in cluster.lanes[0].requests)
        assert "answer: json" in schema
        assert "answer: calls" in call


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


BAD = [
    (Chat(), "invalid_request", "chat.messages"),
    (Chat(messages=[ChatMessage(role="wizard")]), "out_of_range", "chat.messages.0.role"),
    (Chat(messages=[HELLO, ChatMessage(role="user", reasoning="x")]), "invalid_request", "chat.messages.1"),
    (Chat(messages=[ChatMessage(role="assistant", calls=[ChatCall()])]),
     "invalid_request", "chat.messages.0.calls.0.name"),
    (Chat(messages=[ChatMessage(role="assistant", calls=[ChatCall(name="x", arguments="[1]")])]),
     "invalid_request", "chat.messages.0.calls.0.arguments"),
    (Chat(messages=[HELLO], tools=[ChatTool(name="x", parameters="{")]), "invalid_request", "chat.tools.0.parameters"),
    (Chat(messages=[HELLO], tools=[ChatTool(name="x", parameters=nested(limits.JSON_DEPTH + 1))]),
     "invalid_request", "chat.tools.0.parameters"),
    (Chat(messages=[HELLO], tools=[ChatTool()]), "out_of_range", "chat.tools.0.name"),
    (Chat(messages=[HELLO], tools=[READ, READ]), "invalid_request", "chat.tools"),
    (Chat(messages=[HELLO], tools=[READ], tool_name="read"), "invalid_request", "chat.tool_name"),
    (Chat(messages=[HELLO], tool_use=serve_pb2.TOOL_USE_REQUIRED), "invalid_request", "chat.tool_use"),
    (Chat(messages=[HELLO], reasoning_effort="much"), "out_of_range", "chat.reasoning_effort"),
    (Chat(messages=[HELLO], answer_schema="5"), "invalid_request", "chat.answer_schema"),
    (Chat(messages=[HELLO], answer_schema='{"type": "nonsense"}'), "invalid_request", "chat.answer_schema"),
    (Chat(messages=[HELLO] * (limits.MESSAGES + 1)), "out_of_range", "chat.messages"),
    (Chat(messages=[HELLO], tools=[READ] * (limits.TOOLS + 1)), "out_of_range", "chat.tools"),
]  # fmt: skip


async def test_refusals_name_the_field(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        for chat, code, field in BAD:
            assert await refusal(cluster, chat=chat) == (code, [field])
        hello = Chat(messages=[HELLO])
        assert await refusal(cluster, chat=hello, stop_ids=[1 << 30]) == ("token_out_of_range", ["stop_ids"])
        assert await refusal(cluster, chat=hello, logprobs=limits.TOP_LOGPROBS + 1) == ("out_of_range", ["logprobs"])
        assert not cluster.lanes[0].requests
        deep = ChatTool(name="deep", parameters=nested(limits.JSON_DEPTH))  # what stands at its limit is taken
        assert await cluster.generate(chat=Chat(messages=[HELLO], tools=[deep]))


async def test_an_answer_that_fails_midway_ends_with_its_code(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        cluster.lanes[0].script_next(fault="error", fault_after=3)
        events = await cluster.generate(chat=Chat(messages=[HELLO]))
        assert events[-1].finished.error_code == "lane_failed"
