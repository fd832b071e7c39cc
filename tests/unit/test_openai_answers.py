from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator.answer import AnswerToken, Final, Piece
from coordinator.apis.logprobs import LogprobFeed
from coordinator.apis.openai.answers import CompletionWriter, error_body
from coordinator.apis.writer import dump
from coordinator.chat import Turn, TurnEnd
from coordinator.context_limit import too_long
from coordinator.errors import LaneLost, QueueFull
from coordinator.text.desk import TextDesk
from coordinator.text.tokenizer import Tokenizer
from laneproto.v1 import lane_pb2
from tests.fakes.doors import tokenizer_dir


@pytest.fixture
def desk():
    desk = TextDesk(Tokenizer.load(tokenizer_dir()))
    yield desk
    desk.close()


def token(token_id: int, start: int, logprob: float = -0.25, is_stop: bool = False) -> AnswerToken:
    top = [lane_pb2.TokenLogprob(id=token_id, logprob=logprob), lane_pb2.TokenLogprob(id=token_id + 1, logprob=-3)]
    return AnswerToken(lane_pb2.Token(id=token_id, logprob=logprob, top=top), start, is_stop)


FINAL = Final(
    lane_pb2.FINISH_REASON_STOP,
    lane_pb2.Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2),
    lane_pb2.Counters(windows=9, expert_hits=1 << 40),
    "lane-1",
    False,
)


def whole(desk, chat, text, tokens):
    writer = CompletionWriter(chat, "id1", "m", 12, 7, desk, logprobs=tokens is not None)
    return writer.whole(Turn(content=text, tokens=tokens or []), TurnEnd(FINAL, called=False))


def test_errors_have_openais_shape() -> None:
    error = error_body(too_long("9 tokens", context_tokens=8, param="prompt"))["error"]
    assert "maximum context length is 8 tokens" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"}
    assert error_body(QueueFull("full"))["error"]["type"] == "server_error"
    assert error_body(LaneLost("lost"))["error"] == {
        "message": "lost", "type": "server_error", "param": None, "code": "lane_lost",
    }  # fmt: skip


def test_a_whole_chat_answer(desk: TextDesk) -> None:
    body = whole(desk, True, "hi", [token(65, 0)])
    assert body["object"] == "chat.completion"
    assert body["id"] == "chatcmpl-id1"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hi", "refusal": None}
    assert choice["finish_reason"] == "stop"
    entry = choice["logprobs"]["content"][0]
    assert entry["token"] == desk.token_text(65)
    assert bytes(entry["bytes"]) == desk.token_bytes(65)
    assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.25, -3]
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip
    assert body["expressway"]["lane"] == "lane-1"
    assert body["expressway"]["counters"]["expert_hits"] == 1 << 40
    assert body["expressway"]["counters"]["cancelled"] == 0
    assert "approximate" not in body["expressway"]
    usage = lane_pb2.Usage(prompt_tokens=5, approximations=["kv-int8"])
    said = CompletionWriter(True, "id1", "m", 12, 7, desk, logprobs=False).whole(
        Turn(content="hi", tokens=[]), TurnEnd(replace(FINAL, usage=usage), called=False)
    )
    assert said["expressway"]["approximate"] == ["kv-int8"]
    json.loads(dump(body))


def test_a_whole_completion(desk: TextDesk) -> None:
    body = whole(desk, False, "hi", [token(65, 0), token(66, 1)])
    assert (body["object"], body["id"], body["choices"][0]["text"]) == ("text_completion", "cmpl-id1", "hi")
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["tokens"] == [desk.token_text(65), desk.token_text(66)]
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["top_logprobs"][0] == {desk.token_text(65): -0.25, desk.token_text(66): -3}
    assert whole(desk, False, "", None)["choices"][0]["logprobs"] is None


def test_an_impossible_token_is_still_json(desk: TextDesk) -> None:
    for logprob in (float("-inf"), float("nan")):
        body = whole(desk, True, "", [token(65, 0, logprob)])
        assert json.loads(dump(body))["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_tokens_come_with_their_text() -> None:
    feed = LogprobFeed()
    a, b, c = token(65, 0), token(66, 1), token(67, 3)
    assert feed.feed(Piece("x", (a, b, c))) == [a]  # the text of b is held back
    assert feed.feed(Piece("yz", ())) == [b]
    assert feed.flush(FINAL) == [c]


def test_tokens_of_a_stop_string_never_come() -> None:
    feed = LogprobFeed()
    a, b, end = token(65, 0), token(66, 1), token(2, 2, is_stop=True)
    assert feed.feed(Piece("x", (a, b, end))) == [a]
    stopped = Final(FINAL.reason, FINAL.usage, FINAL.counters, "lane-1", True)
    assert feed.flush(stopped) == []
