"""The `openai` package against the real HTTP door on a scripted lane."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.doors import Cluster, open_doors, spelt, thinking_dir, until
from tests.fakes.lane import Script

pytestmark = pytest.mark.conformance

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "today's", "parameters": PARAMETERS}}
FLAT = {"type": "function", "name": "weather", "description": "today's", "parameters": PARAMETERS, "strict": False}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
TURN = f"hm\n</think>\n\nI look.\n\n{CALL}<|im_end|>"
HELLO = [{"role": "user", "content": "Hello"}]


@contextlib.asynccontextmanager
async def served(tmp_path: Path, text: str = TURN, **options: Any) -> AsyncIterator[tuple[Cluster, openai.AsyncOpenAI]]:
    lane = {key: options.pop(key) for key in ("context_tokens", "queue_requests") if key in options}
    script = Script(tokens=spelt(text), **options)
    async with (
        open_doors(tmp_path, lanes=1, script=script, text_from=thinking_dir(), model_name="qwen", **lane) as cluster,
        openai.AsyncOpenAI(api_key="none", base_url=f"http://{cluster.doors.http}/v1", max_retries=0) as client,
    ):
        yield cluster, client


async def test_models(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        assert [model.id async for model in client.models.list()] == ["qwen"]
        assert (await client.models.retrieve("qwen")).id == "qwen"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_chat_with_tools(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        answer = await client.chat.completions.create(model="qwen", messages=HELLO, tools=[TOOL])
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert choice.message.reasoning_content == "hm"
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        cluster.lanes[0].script_next(tokens=spelt("ok</think>Rain.<|im_end|>"))
        history = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        answer = await client.chat.completions.create(model="qwen", messages=history, tools=[TOOL])
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Rain.")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streams(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, client):
        async with client.chat.completions.stream(
            model="qwen", messages=HELLO, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "I look."
        assert final.choices[0].message.tool_calls[0].function.name == "weather"
        assert final.usage.completion_tokens == len(spelt(TURN))
        assert "content.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds


async def test_the_synchronous_client(tmp_path: Path) -> None:
    async with served(tmp_path, "x</think>Hello there") as (cluster, _):

        def ask() -> tuple[str | None, str, str]:
            with openai.OpenAI(api_key="none", base_url=f"http://{cluster.doors.http}/v1") as client:
                whole = client.chat.completions.create(model="qwen", messages=HELLO)
                chunks = client.chat.completions.create(model="qwen", messages=HELLO, stream=True, logprobs=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                plain = client.completions.create(model="qwen", prompt="a", max_tokens=3)
                return whole.choices[0].message.content, text, plain.choices[0].text

        content, text, plain = await asyncio.to_thread(ask)
        assert content == text == "Hello there"
        assert plain


async def test_errors(tmp_path: Path) -> None:
    async with served(tmp_path, context_tokens=512) as (cluster, client):
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="qwen", messages=HELLO, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
            await client.chat.completions.create(model="qwen", messages=[{"role": "user", "content": "w " * 400}])
        assert caught.value.code == "context_length_exceeded"
        cluster.roster.lose("lane-0", "quarantined")
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="qwen", messages=HELLO)
        assert refused.value.status_code == 503


async def test_a_client_that_leaves_frees_the_lane(tmp_path: Path) -> None:
    async with served(tmp_path, "a" * 400, token_delay_s=0.02) as (cluster, client):
        stream = await client.chat.completions.create(model="qwen", messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: not cluster.lanes[0].busy, 60)


async def test_responses_with_tools(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, client):
        include = ["reasoning.encrypted_content"]
        ask: Any = {"model": "qwen", "tools": [FLAT], "store": False, "include": include}
        answer = await client.responses.create(input="Hello", instructions="Be brief.", **ask)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert (answer.status, answer.output_text) == ("completed", "I look.")
        call = answer.output[2]
        assert json.loads(call.arguments) == {"city": "Bern"}
        async with client.responses.stream(input="Hello", instructions="Be brief.", **ask) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
        assert streamed.output_text == "I look."
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        first = list(cluster.lanes[0].requests[-1].prompt_ids)
        # what a client keeps of reasoning is the packed form
        kept = [{**answer.output[0].model_dump(), "content": None}, *answer.output[1:]]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        history: Any = [{"role": "user", "content": "Hello"}, *kept, output]
        await client.responses.create(input=history, instructions="Be brief.", **ask)
        text = cluster.doors.serving.text.token_text
        said = "".join(map(text, [*first, *spelt(TURN)]))
        assert "".join(map(text, cluster.lanes[0].requests[-1].prompt_ids)).startswith(said)


async def test_a_free_form_tool(tmp_path: Path) -> None:
    call = CALL.replace("weather", "patch").replace("city", "input")
    async with served(tmp_path, f"</think>{call}<|im_end|>") as (_, client):
        answer = await client.responses.create(
            model="qwen", input="x", tools=[{"type": "custom", "name": "patch", "description": "d"}]
        )
        assert (answer.output[0].type, answer.output[0].input) == ("custom_tool_call", "Bern")


async def test_responses_that_end_early(tmp_path: Path) -> None:
    async with served(tmp_path, "</think>Hello") as (cluster, client):
        answer = await client.responses.create(model="qwen", input="x", max_output_tokens=2)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="qwen", input="x", previous_response_id="resp_1")
        cluster.lanes[0].script_next(tokens=spelt("</think>" + "a" * 60), fault="error", fault_after=3)
        stream = await client.responses.create(model="qwen", input="x", stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.failed"


async def test_structured_output_and_forced_calls_carry_a_grammar(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with served(tmp_path, '</think>{"n": 5}<|im_end|>') as (cluster, client):
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        answer = await client.chat.completions.create(model="qwen", messages=HELLO, response_format=wanted)
        assert json.loads(answer.choices[0].message.content) == {"n": 5}
        assert "%json" in cluster.lanes[0].requests[-1].grammar
        text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        response = await client.responses.create(model="qwen", input="x", text=text)
        assert json.loads(response.output_text) == {"n": 5}
        assert cluster.lanes[0].requests[-1].grammar
        cluster.lanes[0].script_next(tokens=spelt(TURN))
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            await client.chat.completions.create(model="qwen", messages=HELLO, tools=[TOOL], tool_choice=choice)
            assert "weather" in cluster.lanes[0].requests[-1].grammar
        await client.chat.completions.create(model="qwen", messages=HELLO, tools=[TOOL])
        assert not cluster.lanes[0].requests[-1].grammar
        wanted["json_schema"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="qwen", messages=HELLO, response_format=wanted)
        assert caught.value.param == "response_format"
