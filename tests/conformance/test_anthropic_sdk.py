"""The `anthropic` package against the real HTTP door on a scripted lane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.fakes.doors import Cluster, open_doors, spelt, thinking_dir, until
from tests.fakes.lane import Script

pytestmark = pytest.mark.conformance

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "today's", "input_schema": SCHEMA}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
TURN = f"hm\n</think>\n\nI look.\n\n{CALL}<|im_end|>"
HELLO: Any = [{"role": "user", "content": "Hello"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
ASK: Any = {"model": "qwen", "max_tokens": 2048, "messages": HELLO}


@contextlib.asynccontextmanager
async def served(
    tmp_path: Path, text: str = TURN, **options: Any
) -> AsyncIterator[tuple[Cluster, anthropic.AsyncAnthropic]]:
    lane = {key: options.pop(key) for key in ("context_tokens",) if key in options}
    script = Script(tokens=spelt(text), **options)
    async with (
        open_doors(tmp_path, lanes=1, script=script, text_from=thinking_dir(), model_name="qwen", **lane) as cluster,
        anthropic.AsyncAnthropic(api_key="none", base_url=f"http://{cluster.doors.http}", max_retries=0) as client,
    ):
        yield cluster, client


async def test_models(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == ["qwen"]


async def test_a_round_trip_with_a_tool(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        message = await client.messages.create(**ASK, tools=[TOOL], thinking=THINK)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.stop_reason == "tool_use"
        thought, text, call = message.content
        assert (thought.thinking, text.text, call.input) == ("hm", "I look.", {"city": "Bern"})
        first = list(cluster.lanes[0].requests[-1].prompt_ids)
        cluster.lanes[0].script_next(tokens=spelt("ok</think>Rain.<|im_end|>"))
        history: Any = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
        ]
        message = await client.messages.create(**{**ASK, "messages": history}, tools=[TOOL], thinking=THINK)
        assert (message.content[-1].text, message.stop_reason) == ("Rain.", "end_turn")
        text_of = cluster.doors.serving.text.token_text
        said = "".join(map(text_of, [*first, *spelt(TURN)]))
        assert "".join(map(text_of, cluster.lanes[0].requests[-1].prompt_ids)).startswith(said)


async def test_a_stream_has_its_events_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        events = [
            event async for event in await client.messages.create(**ASK, tools=[TOOL], thinking=THINK, stream=True)
        ]
        kinds = [event.type for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        starts = [event for event in events if event.type == "content_block_start"]
        assert [(event.index, event.content_block.type) for event in starts] == [
            (0, "thinking"), (1, "text"), (2, "tool_use"),
        ]  # fmt: skip
        open_block = None
        for event in events:
            if event.type == "content_block_start":
                assert open_block is None
                open_block = event.index
            elif event.type == "content_block_delta":
                assert event.index == open_block
            elif event.type == "content_block_stop":
                assert event.index == open_block
                open_block = None
        async with client.messages.stream(**ASK, tools=[TOOL], thinking=THINK) as stream:
            message = await stream.get_final_message()
        assert message.content[2].input == {"city": "Bern"}
        assert message.content[0].signature
        assert message.usage.output_tokens == len(spelt(TURN))
        assert message.usage.input_tokens > 0


async def test_without_thinking_there_is_none(tmp_path: Path) -> None:
    async with served(tmp_path, "Hello STOP more") as (_, client):
        message = await client.messages.create(**ASK, stop_sequences=["STOP"])
        assert [block.type for block in message.content] == ["text"]
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (
            "stop_sequence",
            "STOP",
            "Hello ",
        )
        message = await client.messages.create(**{**ASK, "max_tokens": 2})
        assert message.stop_reason == "max_tokens"


async def test_tokens_are_counted(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        ask: Any = {"model": "qwen", "messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
        counted = await client.messages.count_tokens(**ask)
        message = await client.messages.create(**ask, max_tokens=5)
        assert counted.input_tokens == message.usage.input_tokens == len(cluster.lanes[0].requests[-1].prompt_ids)
        long: Any = [{"role": "user", "content": "w " * 9000}]
        assert (await client.messages.count_tokens(model="qwen", messages=long)).input_tokens > 9000


async def test_a_line_that_names_the_build_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        for build in ("1", "2"):
            line = f"x-anthropic-billing-header: cc_version={build}"
            system: Any = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
            await client.messages.create(**ASK, system=system)
        first, second = (list(request.prompt_ids) for request in cluster.lanes[0].requests)
        assert first == second


async def test_the_synchronous_client(tmp_path: Path) -> None:
    async with served(tmp_path, "Hello there") as (cluster, _):

        def ask() -> str:
            with (
                anthropic.Anthropic(api_key="none", base_url=f"http://{cluster.doors.http}") as client,
                client.messages.stream(**ASK) as stream,
            ):
                return "".join(stream.text_stream)

        assert await asyncio.to_thread(ask) == "Hello there"


async def test_errors(tmp_path: Path) -> None:
    async with served(tmp_path, context_tokens=512) as (cluster, client):
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ASK, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 512 tokens"):
            await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "w " * 400}]})
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.type"):
            await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**ASK, "messages": [*HELLO, {"role": "assistant", "content": "I"}]})
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert caught.value.request_id
        cluster.lanes[0].script_next(fault="error", fault_after=3)
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        cluster.roster.lose("lane-0", "quarantined")
        with pytest.raises(anthropic.InternalServerError) as refused:
            await client.messages.create(**ASK)
        assert refused.value.status_code == 529


async def test_a_client_that_leaves_frees_the_lane(tmp_path: Path) -> None:
    async with served(tmp_path, "a" * 400, token_delay_s=0.02) as (cluster, client):
        async with client.messages.stream(**ASK) as stream:
            async for _ in stream:
                break
        await until(lambda: not cluster.lanes[0].busy, 60)


async def test_structured_output_and_forced_calls_carry_a_grammar(tmp_path: Path) -> None:
    async with served(tmp_path, '{"n": 5}<|im_end|>') as (cluster, client):
        config: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        message = await client.messages.create(**ASK, output_config=config)
        assert message.content[0].text == '{"n": 5}'
        assert "%json" in cluster.lanes[0].requests[-1].grammar
        for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
            await client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
            assert "weather" in cluster.lanes[0].requests[-1].grammar
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "tool", "name": "other"})
