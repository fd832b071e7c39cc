"""The HTTP door over real sockets, on simulated lanes: shapes, streams, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator import limits
from coordinator.text.tokenizer import Tokenizer
from tests.fakes.doors import VOCAB_SIZE, Cluster, events_of, open_doors, tokenizer_dir, until
from tests.fakes.lane import Script, token_at

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def tokenizer() -> Tokenizer:
    found = Tokenizer.load(tokenizer_dir())
    assert found is not None
    return found


def script_of(text: str, **more: Any) -> Script:
    """A lane that says `text` and then its end token."""
    return Script(tokens=(*tokenizer().encode(text), 2), **more)


TEXT = "Zürich → 東京 🚄 done"


async def test_a_completion(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=script_of(TEXT)) as cluster:
        status, headers, body = await cluster.post(COMPLETIONS, {"model": "fake", "prompt": "hello", "max_tokens": 200})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        count = len(tokenizer().encode(TEXT)) + 1
        asked = len(tokenizer().encode("hello"))
        assert body["usage"] == {
            "prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
            },
        }  # fmt: skip
        assert body["expressway"]["lane"] == headers["x-expressway-lane"] == "lane-0"
        assert body["expressway"]["counters"]["generated_tokens"] == count
        assert headers["x-request-id"] == body["expressway"]["request_id"] == cluster.lanes[0].requests[0].request_id
        assert headers["server"] == "expressway"
        sent = cluster.lanes[0].requests[0]
        assert list(sent.prompt_ids) == tokenizer().encode("hello")
        assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.top_p) == (1.0, 0, 1.0)
        assert sent.sampling.seed == body["expressway"]["seed"]
        assert list(sent.stop_ids) == [2]


async def test_a_chat_answer_and_what_the_lane_was_asked(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=script_of(TEXT)) as cluster:
        status, _, body = await cluster.post(
            CHAT,
            {
                "model": "fake", "messages": HELLO, "max_completion_tokens": 99, "max_tokens": 5, "temperature": 0.5,
                "top_p": 0.9, "top_k": 40, "seed": 11, "user": "me", "stop_token_ids": [7],
            },
        )  # fmt: skip
        assert status == 200
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        assert choice["finish_reason"] == "stop"
        sent = cluster.lanes[0].requests[0]
        assert (sent.max_tokens, sent.sampling.seed, sent.sampling.top_k) == (99, 11, 40)
        assert (round(sent.sampling.temperature, 5), round(sent.sampling.top_p, 5)) == (0.5, 0.9)
        assert list(sent.stop_ids) == [2, 7]
        assert sent.prompt_ids[0] == tokenizer().special("<|im_start|>")
        assert not sent.logprobs


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path, path: str, chunk: int) -> None:
    chat = path == CHAT
    ask = {"messages": HELLO, "logprobs": True, "top_logprobs": 2} if chat else {"prompt": "hello", "logprobs": 2}
    ask |= {"max_tokens": 200, "seed": 3}
    async with open_doors(tmp_path, lanes=1, script=script_of(TEXT, chunk_tokens=chunk)) as cluster:
        _, _, whole = await cluster.post(path, ask)
        ask |= {"stream": True, "stream_options": {"include_usage": True}}
        status, headers, text = await cluster.post(path, ask)
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-expressway-lane"] == "lane-0"
        assert headers["cache-control"] == "no-store"
        *chunks, usage, done = events_of(text)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if chat else "text_completion"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert chunks[-1]["expressway"]["lane"] == "lane-0"
        assert chunks[-1]["expressway"]["seed"] == 3
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        expected = whole["choices"][0]
        if chat:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
            assert [entry for part in logprobs for entry in part["content"]] == expected["logprobs"]["content"]
            assert b"".join(bytes(entry["bytes"]) for entry in expected["logprobs"]["content"]).decode() == TEXT
            assert all(len(entry["top_logprobs"]) == 2 for entry in expected["logprobs"]["content"])
        else:
            assert "".join(choice["text"] for choice in choices) == TEXT
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [entry for part in logprobs for entry in part[name]] == expected["logprobs"][name]
            assert len(expected["logprobs"]["tokens"]) == len(tokenizer().encode(TEXT))  # the end token has no text
            offsets = expected["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert offsets[0] == 0


async def test_without_include_usage_there_is_no_usage_chunk(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=script_of("hello")) as cluster:
        _, _, text = await cluster.post(CHAT, {"messages": HELLO, "stream": True})
        events = events_of(text)
        assert events[-1] == "[DONE]"
        assert all(event["choices"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk", [1, 50])
async def test_a_stop_string_across_tokens_ends_the_answer(tmp_path: Path, stream: bool, chunk: int) -> None:
    said = "one two STOP three " * 40
    script = script_of(said, chunk_tokens=chunk, token_delay_s=0.001)
    async with open_doors(tmp_path, lanes=1, script=script) as cluster:
        ask = {"prompt": "x", "stop": ["zzz", " STOP t"], "max_tokens": 2000, "logprobs": 0, "stream": stream}
        status, _, body = await cluster.post(COMPLETIONS, ask)
        assert status == 200
        if stream:
            *events, done = events_of(body)
            assert done == "[DONE]"
            choices = [event["choices"][0] for event in events]
            assert "".join(choice["text"] for choice in choices) == "one two"
            assert choices[-1]["finish_reason"] == "stop"
            tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        else:
            assert body["choices"][0]["text"] == "one two"
            assert body["choices"][0]["finish_reason"] == "stop"
            tokens = body["choices"][0]["logprobs"]["tokens"]
            counted = len(tokenizer().encode("one two STOP t"))
            assert counted <= body["usage"]["completion_tokens"] <= counted + 1
        assert "one two".startswith("".join(tokens)[:7])
        assert "STOP" not in "".join(tokens)
        await until(lambda: bool(cluster.lanes[0].ended))
        assert not cluster.lanes[0].busy
        status, _, _ = await cluster.post(COMPLETIONS, {"prompt": "x", "stop": "two"})
        assert status == 200


async def test_token_ids_in_and_no_tokenizer(tmp_path: Path) -> None:
    empty = tmp_path / "pack"
    empty.mkdir()
    async with open_doors(tmp_path, text_from=empty) as cluster:
        status, _, body = await cluster.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3})
        assert (status, body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (200, "", 3)
        for path, ask in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
            status, _, body = await cluster.post(path, ask)
            assert (status, body["error"]["code"]) == (400, "tokenizer_missing")


async def test_defaults_of_the_two_endpoints(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        await cluster.post(COMPLETIONS, {"prompt": [5]})
        await cluster.post(CHAT, {"messages": HELLO, "max_tokens": 1})
        await cluster.post(COMPLETIONS, {"prompt": [5], "temperature": 0, "max_tokens": 1})
        limits_sent = [sent.max_tokens for sent in cluster.lanes[0].requests]
        assert limits_sent == [limits.DEFAULT_MAX_TOKENS_COMPLETIONS, 1, 1]
        seeds = [sent.sampling.seed for sent in cluster.lanes[0].requests]
        assert len(set(seeds)) == 3


async def test_models_and_health(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=2) as cluster:
        status, body = await cluster.get("/v1/models")
        assert status == 200
        assert [card["id"] for card in body["data"]] == ["fake"]
        assert (await cluster.get("/v1/models/fake"))[1] == body["data"][0]
        assert (await cluster.get("/v1/models/other"))[0] == 404
        assert await cluster.get("/healthz") == (200, {"status": "ok"})
        cluster.roster.lose("lane-0")
        assert (await cluster.get("/healthz"))[0] == 200
        cluster.roster.lose("lane-1")
        assert await cluster.get("/healthz") == (503, {"status": "unavailable"})
        assert (await cluster.get("/v1/models"))[0] == 200  # what was served last


@pytest.mark.parametrize(
    ("path", "ask", "code", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "empty_prompt", "prompt"),
        (COMPLETIONS, {"prompt": []}, "empty_prompt", "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "token_out_of_range", "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "token_out_of_range", "prompt"),
        (COMPLETIONS, {"prompt": [1 << 70]}, "token_out_of_range", "prompt"),
        (COMPLETIONS, {"prompt": [5] * 64}, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "w " * 64}, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "w" * 100_000}, "context_length_exceeded", "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "out_of_range", "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "temperature": 2.1}, "out_of_range", "temperature"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "out_of_range", "top_p"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "out_of_range", "logprobs"),
        (COMPLETIONS, {"prompt": "x", "stop": ["x"] * 17}, "out_of_range", "stop"),
        (COMPLETIONS, {"prompt": "x", "echo": True}, "unsupported", "echo"),
        (COMPLETIONS, {"prompt": "x", "n": 2}, "unsupported", "n"),
        (COMPLETIONS, {"prompt": ["x", "y"]}, "unsupported", "prompt"),
        (COMPLETIONS, {}, "invalid_request", "prompt"),
        (COMPLETIONS, {"prompt": "x", "model": "gpt"}, "model_not_found", "model"),
        (CHAT, {"messages": []}, "invalid_request", "messages"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -3}, "out_of_range", "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "invalid_request", "tools.0.function"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "x"}}, "invalid_request", "response_format.type"),
        (CHAT, {"messages": [{"role": "user", "content": "w " * 64}]}, "context_length_exceeded", "messages"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "out_of_range", "top_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_openais_shape(
    shared: Cluster, path: str, ask: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    status, headers, body = await shared.post(path, {**ask, "stream": stream})
    assert status == (404 if code == "model_not_found" else 400)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert "retry-after" not in headers
    assert len(headers["x-request-id"]) == 24
    assert not shared.lanes[0].requests


@pytest.fixture
async def shared(tmp_path: Path):
    async with open_doors(tmp_path, lanes=1, context_tokens=64) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/healthz", 405, "method_not_allowed"),
    ],
)
async def test_unknown_paths_and_methods(shared: Cluster, method: str, path: str, status: int, code: str) -> None:
    found, body = await shared.get(path, method)
    assert (found, body["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("data", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_request"),
        (b"", {}, 400, "invalid_request"),
        (b'{"prompt": "x", "temperature": NaN}', {}, 400, "invalid_request"),
        (b'{"prompt": "x", "x": ' + b"[" * 100_000, {}, 400, "invalid_request"),
        (b'{"prompt": "\\ud800"}', {}, 400, "invalid_request"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
    ],
)
async def test_bodies_that_are_not_plain_json(
    shared: Cluster, data: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    headers = {"content-type": "application/json", **headers}
    async with shared.http.post(COMPLETIONS, data=data, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_size_of_a_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunked: bool) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES", 100_000)

    def body(size: int) -> Any:
        data = b'{"prompt": [5], "max_tokens": 1, "x": "' + b"y" * (size - 41) + b'"}'
        assert len(data) == size

        async def parts():
            yield data[:1000]
            yield data[1000:]

        return parts() if chunked else data

    async with open_doors(tmp_path) as cluster:
        for size, status in ((100_000, 200), (100_001, 413)):
            headers = {"content-type": "application/json"}
            async with cluster.http.post(COMPLETIONS, data=body(size), headers=headers) as response:
                assert response.status == status
                if status == 413:
                    assert (await response.json())["error"]["code"] == "body_too_large"


async def test_a_body_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_READ_S", 0.05)
    async with open_doors(tmp_path) as cluster:
        reader, writer = await asyncio.open_connection(cluster.doors.http.host, cluster.doors.http.port)
        head = (
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Content-Length: 9",
            "",
            "{",
        )
        writer.write("\r\n".join(head).encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in answer.splitlines()[0]
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("name", ["x-session-id", "x-session-affinity", "session-id", "x-claude-code-session-id"])
async def test_sessions_stay_on_their_lane(tmp_path: Path, name: str) -> None:
    async with open_doors(tmp_path, lanes=3) as cluster:
        homes: dict[str, set[str]] = {}
        for session in ("a", "b", "c", "b", "a", "c", "c"):
            _, headers, _ = await cluster.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}, headers={name: session})
            homes.setdefault(session, set()).add(headers["x-expressway-lane"])
        assert all(len(lanes) == 1 for lanes in homes.values())
        assert len(set.union(*homes.values())) == 3
        status, _, body = await cluster.post(COMPLETIONS, {"prompt": [5]}, headers={name: "x" * 257})
        assert (status, body["error"]["param"]) == (400, name)


async def test_ids_are_the_servers_and_the_clients_is_only_echoed(tmp_path: Path) -> None:
    async with open_doors(tmp_path) as cluster:
        for named, echoed in (("abc-1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)):
            _, headers, _ = await cluster.post(
                COMPLETIONS, {"prompt": [5], "max_tokens": 1}, headers={"x-request-id": named}
            )
            assert headers["x-request-id"] != named
            assert (headers.get("x-client-request-id") == named) == echoed
            assert ("x-client-request-id" in headers) == echoed
        assert all(len(sent.request_id) == 24 for lane in cluster.lanes for sent in lane.requests)


async def test_two_requests_at_once_use_two_lanes(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=Script(token_delay_s=0.01)) as cluster:
        answers = await asyncio.gather(
            *(cluster.post(COMPLETIONS, {"prompt": [5 + k], "max_tokens": 10, "logprobs": 0}) for k in range(2))
        )
        assert {headers["x-expressway-lane"] for _, headers, _ in answers} == {"lane-0", "lane-1"}
        for k, (_, _, body) in enumerate(answers):
            expected = [tokenizer().token_text(token_at([5 + k], index, VOCAB_SIZE)) for index in range(10)]
            assert body["choices"][0]["logprobs"]["tokens"] == expected


async def test_comments_keep_a_silent_stream_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEPALIVE_COMMENT_S", 0.02)
    async with open_doors(tmp_path, lanes=1, script=script_of("hello", prefill_delay_s=0.15)) as cluster:
        queued, running = await asyncio.gather(
            *(cluster.post(CHAT, {"messages": HELLO, "stream": True}) for _ in range(2))
        )
        for _, _, text in (queued, running):
            assert text.count(": keep-alive\n\n") >= 2
            assert events_of(text)[-1] == "[DONE]"
            deltas = [event["choices"][0]["delta"] for event in events_of(text)[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == "hello"
