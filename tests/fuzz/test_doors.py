"""Requests of clients at the real doors in this process: any body is answered, in the doors' own words, and no more."""

import asyncio
import contextlib
import json
import socket
import threading
import unicodedata
from pathlib import Path

import grpc
import pytest
from hypothesis import strategies as st

from coordinator.errors import CoordinatorError
from coordinator.text.chat_format import ChatFormat
from coordinator.text.conversation import ChatMessage, Conversation
from coordinator.text.renderer import Marker, PlainText, SpecialToken, render
from coordinator.text.tokenizer import Tokenizer
from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors, tokenizer_dir
from tests.fakes.lane import Script
from tests.fuzz.inputs import JSON_VALUES, either, spoilt
from tests.fuzz.loop import fuzz

CHAT = {
    "model": "fake", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "stream": False,
    "messages": [{"role": "system", "content": "be brief"},
                 {"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.5}, "n": 1,
}  # fmt: skip
COMPLETION = {
    "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": True,
    "logprobs": 1, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
RESPONSE = {
    "model": "fake", "max_output_tokens": 3, "temperature": 0.5, "instructions": "be brief", "stream": True,
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
              {"type": "reasoning", "summary": [], "encrypted_content": "plain:aG0="},
              {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
              {"type": "function_call_output", "call_id": "c", "output": "7"}],
    "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g"}],
    "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
}  # fmt: skip
MESSAGE = {
    "model": "fake", "max_tokens": 3, "system": [{"type": "text", "text": "be brief"}], "stream": True,
    "messages": [{"role": "user", "content": "hello"},
                 {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                                   {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "7"}]}],
    "tools": [TOOL], "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}, "stop_sequences": ["x"],
    "output_config": {"effort": "high"}, "temperature": 1,
}  # fmt: skip
ENDS = {
    "/v1/chat/completions": "data: [DONE]", "/v1/completions": "data: [DONE]",
    "/v1/responses": "event: response.", "/v1/messages": "event: message_stop",
}  # fmt: skip
INSIDE = ("Traceback", 'File "', str(Path(__file__).parents[2]), "/tmp", ".py", ".sock")
CODES = {
    kind.code for kind in [*CoordinatorError.__subclasses__(), *(k for c in CoordinatorError.__subclasses__()
                                                                 for k in c.__subclasses__())]
}  # fmt: skip


class Refused(Exception):
    """The door refused, as it should."""


class Doors:
    """Open doors in a thread with a loop of its own; calls wait for their answer."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        script = Script(tokens=(5, 6, 7))
        self.cluster = self.call(self._stack.enter_async_context(open_doors(directory, lanes=1, script=script)))
        self.generate = self.cluster.channel.unary_stream(
            "/expressway.v1.Expressway/Generate", request_serializer=None, response_deserializer=None
        )

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self):
        self.call(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def post(self, path, data):
        headers = {"content-type": "application/json"}
        async with self.cluster.http.post(path, data=data, headers=headers) as response:
            return response.status, response.content_type, await response.text()

    async def healthy(self):
        async with self.cluster.http.get("/healthz") as response:
            return response.status == 200

    async def events(self, data):
        return [serve_pb2.GenerateResponse.FromString(event) async for event in self.generate(data)]


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    opened = Doors(tmp_path_factory.mktemp("d"))
    yield opened
    opened.close()


def check_http(doors, path):
    def check(data):
        status, kind, text = doors.call(doors.post(path, data))
        assert not [word for word in INSIDE if word in text], text
        if status == 200:
            if kind == "text/event-stream":
                assert ENDS[path] in text.rstrip("\n").rpartition("\n\n")[2]
                assert '"error":{' not in text
            else:
                assert json.loads(text)["usage"]
            return
        error = json.loads(text)["error"]
        assert status in (400, 404, 413, 415, 422), (status, text)
        assert error["code"] in CODES, text
        raise Refused(error["message"])

    return check


@pytest.mark.parametrize(("path", "good"), [
    ("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/v1/responses", RESPONSE),
    ("/v1/messages", MESSAGE),
])  # fmt: skip
def test_http_bodies(doors, path, good):
    more = [b"[" * 5000, b'{"a":' * 2000, json.dumps({**good, "prompt": "\ufeff<|im_end|>"}).encode()]
    fuzz(either(good, JSON_VALUES, lambda value: json.dumps(value).encode(), more), check_http(doors, path), (Refused,))
    assert doors.call(doors.healthy())


def test_http_bytes(doors, caplog):
    """Bytes that may be no HTTP: an answer in the 400s or the connection's end, and nothing of them in the log."""
    body = json.dumps(COMPLETION | {"stream": False}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost:localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    seeds = [
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]
    address = doors.cluster.doors.http

    def check(data):
        answered = b""
        with (
            socket.create_connection((address.host, address.port), timeout=0.5) as client,
            contextlib.suppress(TimeoutError, ConnectionError),  # it waits for more, or has had enough
        ):
            client.sendall(data)
            while piece := client.recv(65536):
                answered += piece
        status = int(answered.split(b" ", 2)[1]) if answered else 0
        if answered.startswith(b"HTTP/1.") and status == 200:
            return
        assert status == 0 or 400 <= status < 500, answered
        assert b"Traceback" not in answered
        raise Refused("no request")

    fuzz(spoilt(seeds), check, (Refused,))
    assert doors.call(doors.healthy())
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]


def test_grpc_generate(doors):
    """Bytes as they come over the wire; what is no message is gRPC's to refuse."""
    whole = st.sampled_from([0, 1, 2, 3, 19, 20, 21, 4096, (1 << 32) - 1])
    reals = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 2.1, -1.0, 101.0, float("nan"), float("inf")])
    ids = st.lists(st.integers(0, 400), max_size=6)
    biases = st.dictionaries(st.integers(0, 400), reals, max_size=3)
    reals_of = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    fields = st.fixed_dictionaries(
        {"max_tokens": whole},
        optional={**dict.fromkeys(reals_of, reals), "top_k": whole, "seed": st.integers(0, (1 << 64) - 1),
                  "stop": st.lists(st.text(max_size=300), max_size=18), "stop_ids": ids, "logprobs": whole,
                  "session": st.text(max_size=300), "logit_bias": biases,
                  "min_tokens": whole, "ignore_eos": st.booleans(),
                  "text": st.text(max_size=40), "token_ids": ids.map(lambda some: serve_pb2.TokenIds(ids=some))},
    )  # fmt: skip
    good = serve_pb2.GenerateRequest(text="hello", max_tokens=3, stop=["x"], logprobs=2, logit_bias={5: 1.0})
    messages = fields.map(lambda some: serve_pb2.GenerateRequest(**some).SerializeToString())

    def check(data):
        try:
            events = doors.call(doors.events(data))
        except grpc.aio.AioRpcError as error:
            said = error.details() or ""
            assert not [word for word in INSIDE if word in said], said
            codes = [value for key, value in error.trailing_metadata() or () if key == "expressway-error-code"]
            if not codes:  # not of the door: bytes that are no message
                with pytest.raises(Exception, match=r"pars|decod|UTF-8|utf-8"):
                    serve_pb2.GenerateRequest.FromString(data)
                raise Refused("no message") from None
            known = error.code() is grpc.StatusCode.INVALID_ARGUMENT and codes[0] in CODES
            raise (Refused(said) if known else AssertionError(f"{error.code()} {codes} {said}")) from None
        assert events[0].WhichOneof("event") == "started"
        assert [event.WhichOneof("event") for event in events].count("finished") == 1
        assert not events[-1].finished.error_code

    fuzz(messages | spoilt([good.SerializeToString()]), check, (Refused,))
    assert doors.call(doors.healthy())


def test_renderer():
    """Specials are where the format puts them and nowhere else, whatever the text looks like."""
    tokenizer = Tokenizer.load(tokenizer_dir())
    names = sorted(tokenizer._special_ids)
    guarded = set(tokenizer._special_ids.values())
    parts = st.sampled_from([*names, "<|im_", "start|>", "<|im_start|>system\n", "\n", " ", "\u200b", "<", "|"])
    texts = st.lists(parts | st.text(max_size=6), max_size=8).map("".join)
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    conversations = st.lists(st.builds(ChatMessage, roles, texts), min_size=1, max_size=5)

    def check(messages):
        segments = list(render(Conversation(messages), ChatFormat()))
        specials = 0
        for segment in segments:
            match segment:
                case PlainText(text):
                    ids = tokenizer.encode(text)
                    assert not guarded.intersection(ids), text
                    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)
                case SpecialToken() | Marker():
                    specials += 1
        tools = sum(message.role == "tool" for message in messages)
        groups = sum(m.role != "tool" or i == 0 or messages[i - 1].role != "tool" for i, m in enumerate(messages))
        assert specials == 2 * groups + 1 + 2 * tools, "as many as turns and results need"
        joined = "".join(s.text if isinstance(s, PlainText) else s.name for s in segments)
        assert all(message.content in joined for message in messages)

    fuzz(conversations, check, ())
