"""Turns of a thinking model that calls tools, through the HTTP door, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator import limits
from tests.fakes.doors import Cluster, events_of, open_doors, spelt, thinking_dir
from tests.fakes.lane import Script

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}}}  # fmt: skip
CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\n{}\n</parameter>\n<parameter=lines>\n7\n</parameter>\n"
    "</function>\n</tool_call>"
)
TURN = f"I think.\n</think>\n\nLet me look.\n\n{CALL.format('/ä')}\n{CALL.format('/b')}<|im_end|>"


def thinking(tmp_path: Path, text: str, **options: Any) -> Any:
    return open_doors(
        tmp_path, lanes=1, script=Script(tokens=spelt(text), **options), text_from=thinking_dir(), model_name="qwen"
    )


async def stream(cluster: Cluster, body: dict[str, Any]) -> list[Any]:
    status, headers, text = await cluster.post(CHAT, {**body, "stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    return events_of(text)


def deltas(events: list[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events[:-1] if event["choices"]]


async def test_a_turn_in_one_body(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        _, _, body = await cluster.post(CHAT, {"messages": HELLO, "tools": [TOOL]})
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("Let me look.", "I think.")
        told = len(spelt("I think.\n</think>"))
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == told
        first, second = message["tool_calls"]
        assert json.loads(first["function"]["arguments"]) == {"path": "/ä", "lines": 7}
        assert json.loads(second["function"]["arguments"])["path"] == "/b"
        assert first["id"] != second["id"]
        assert first["id"].startswith("call_")


async def test_the_same_turn_in_a_stream(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        events = await stream(cluster, {"messages": HELLO, "tools": [TOOL], "stream_options": {"include_usage": True}})
        found = deltas(events)
        assert found[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("reasoning_content", "") for delta in found) == "I think."
        assert "".join(delta.get("content") or "" for delta in found) == "Let me look."
        calls = [call for delta in found for call in delta.get("tool_calls", ())]
        assert [(call["index"], json.loads(call["function"]["arguments"])["path"]) for call in calls] == [
            (0, "/ä"), (1, "/b"),
        ]  # fmt: skip
        assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"
        usage = events[-2]["usage"]
        assert usage["completion_tokens"] == len(spelt(TURN))
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(spelt("I think.\n</think>"))
        assert events[-1] == "[DONE]"


async def test_one_call_when_one_was_asked_for(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        ask = {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}
        _, _, body = await cluster.post(CHAT, ask)
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1
        found = deltas(await stream(cluster, ask))
        assert sum(len(delta.get("tool_calls", ())) for delta in found) == 1


async def test_without_tools_a_call_is_text(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            _, _, body = await cluster.post(CHAT, {"messages": HELLO, **more})
            assert "<tool_call>" in body["choices"][0]["message"]["content"]
            assert body["choices"][0]["finish_reason"] == "stop"


async def test_no_thinking_when_none_is_asked_for(tmp_path: Path) -> None:
    async with thinking(tmp_path, "Hi") as cluster:
        _, _, body = await cluster.post(CHAT, {"messages": HELLO, "reasoning_effort": "none"})
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
        _, _, body = await cluster.post(CHAT, {"messages": HELLO})
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("", "Hi")


async def test_what_comes_back_is_what_was_said(tmp_path: Path) -> None:
    """The next turn's prompt begins with the last one's prompt and answer, token for token."""
    async with thinking(tmp_path, TURN) as cluster:
        ask: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
        _, _, body = await cluster.post(CHAT, ask)
        sent = cluster.lanes[0].requests[-1]
        results = [
            {"role": "tool", "content": "found", "tool_call_id": call["id"]}
            for call in body["choices"][0]["message"]["tool_calls"]
        ]
        ask["messages"] = [*HELLO, body["choices"][0]["message"], *results]
        await cluster.post(CHAT, ask)
        again = list(cluster.lanes[0].requests[-1].prompt_ids)
        text = cluster.doors.serving.text
        said = "".join(text.token_text(token) for token in [*sent.prompt_ids, *spelt(TURN)])
        assert "".join(map(text.token_text, again)).startswith(said)


async def test_a_failed_answer_is_one_error(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN, fault="error", fault_after=12) as cluster:
        events = await stream(cluster, {"messages": HELLO, "tools": [TOOL]})
        assert [event for event in events if "error" in event] == events[-1:]


async def test_something_is_sent_while_a_call_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_COMMENT_S", 0.02)
    call = "</think>" + CALL.format("x" * 60)
    async with thinking(tmp_path, call, token_delay_s=0.005) as cluster:
        _, _, text = await cluster.post(CHAT, {"messages": HELLO, "tools": [TOOL], "stream": True})
        assert text.count(": keep-alive") >= 2
        assert text.endswith("data: [DONE]\n\n")


async def test_logprobs_cover_every_token(tmp_path: Path) -> None:
    async with thinking(tmp_path, TURN) as cluster:
        ask = {"messages": HELLO, "tools": [TOOL], "logprobs": True}
        _, _, body = await cluster.post(CHAT, ask)
        whole = body["choices"][0]["logprobs"]["content"]
        events = await stream(cluster, ask)
        pieces = [e for event in events[:-1] for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert pieces == whole
        assert len(whole) == len(spelt(TURN)) - 1  # the end token has no text
