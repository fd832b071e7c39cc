"""Sampling fields through both doors to a simulated lane: all of them, their limits, and the pack's recommendations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.text.tokenizer import Tokenizer
from tests.fakes.doors import open_doors, tokenizer_dir
from tests.fakes.lane import Script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def test_every_sampling_field_reaches_the_lane(tmp_path: Path) -> None:
    said = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "seed": 11, "repetition_penalty": 1.5,
        "presence_penalty": 1, "frequency_penalty": -0.5, "min_tokens": 3,
    }  # fmt: skip
    asked = {**said, "logit_bias": {"7": -100, "300": 2.5}, "max_completion_tokens": 5, "stop_token_ids": [9]}
    async with open_doors(tmp_path, lanes=1) as cluster:
        await cluster.post(COMPLETIONS, {"prompt": [5], **asked})
        await cluster.post(CHAT, {"messages": HELLO, **asked, "ignore_eos": True})
        plain, chat = cluster.lanes[0].requests
        for sent in (plain, chat):
            assert {name: getattr(sent.sampling, name) for name in said} == said
            assert dict(sent.sampling.logit_bias) == {7: -100.0, 300: 2.5}
            assert (sent.max_tokens, sent.replayed_tokens) == (5, 0)
        assert list(plain.stop_ids) == [2, 9]
        assert list(chat.stop_ids) == [9]  # neither the model's end nor the chat format's


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("min_p", 1.5, "out_of_range"), ("repetition_penalty", 0, "out_of_range"),
        ("presence_penalty", 2.1, "out_of_range"), ("frequency_penalty", -2.1, "out_of_range"),
        ("logit_bias", {"5": 101}, "out_of_range"),
        ("logit_bias", {"384": 1}, "token_out_of_range"), ("logit_bias", {"x": 1}, "invalid_request"),
        ("logit_bias", {str(n): 1 for n in range(301)}, "out_of_range"), ("min_tokens", 17, "out_of_range"),
        ("n", 2, "unsupported"), ("stop_token_ids", [384], "token_out_of_range"),
    ],
)  # fmt: skip
async def test_sampling_fields_are_refused_by_name(tmp_path: Path, field: str, value: Any, code: str) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        status, _, body = await cluster.post(COMPLETIONS, {"prompt": [5], field: value})
        assert (status, body["error"]["code"]) == (400, code)
        assert body["error"]["param"] == field
        assert not cluster.lanes[0].requests


async def test_an_infinite_number_is_refused(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        headers = {"content-type": "application/json"}
        for number in (b"1e999", b"-1e999", b"NaN", b"1" + b"0" * 400):
            body = b'{"prompt": [5], "presence_penalty": ' + number + b"}"
            async with cluster.http.post(COMPLETIONS, data=body, headers=headers) as response:
                assert response.status == 400
        assert not cluster.lanes[0].requests


async def test_the_packs_recommendations_hold_where_a_client_does_not_say(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    shutil.copytree(tokenizer_dir(), pack)
    recommended = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.25, "eos_token_id": [2, 17]}
    (pack / "generation_config.json").write_text(json.dumps(recommended))
    async with open_doors(tmp_path, lanes=1, text_from=pack) as cluster:
        await cluster.post(COMPLETIONS, {"prompt": [5]})
        await cluster.post(COMPLETIONS, {"prompt": [5], "temperature": 1, "top_p": 1, "top_k": 0})
        await cluster.generate(token_ids={"ids": [5]}, max_tokens=1)
        silent, loud, grpc = (sent.sampling for sent in cluster.lanes[0].requests)
        assert (silent.temperature, silent.top_k, silent.top_p, silent.repetition_penalty) == (0.5, 20, 0.75, 1.25)
        assert (loud.temperature, loud.top_k, loud.top_p, loud.repetition_penalty) == (1.0, 0, 1.0, 1.25)
        assert (grpc.temperature, grpc.top_k, grpc.top_p, grpc.repetition_penalty) == (0.0, 0, 1.0, 1.0)
        assert [list(sent.stop_ids) for sent in cluster.lanes[0].requests] == [[2, 17]] * 3


async def test_a_stop_string_waits_for_min_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_dir())
    assert tokenizer is not None
    said = [token for letter in "abcabcabc" for token in tokenizer.encode(letter)]
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=tuple(said))) as cluster:
        for least, text in ((0, "ab"), (3, "abcab"), (4, "abcab"), (len(said), "abcabcabc")):
            body = {"prompt": [5], "stop": "c", "min_tokens": least, "max_tokens": 16}
            _, _, answer = await cluster.post(COMPLETIONS, body)
            assert answer["choices"][0]["text"] == text


async def test_every_sampling_field_of_grpc_reaches_the_lane(tmp_path: Path) -> None:
    said = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.125, "seed": 11, "repetition_penalty": 1.5,
        "presence_penalty": -2.0, "frequency_penalty": 2.0, "min_tokens": 3,
    }  # fmt: skip
    async with open_doors(tmp_path, lanes=1) as cluster:
        await cluster.generate(text="x", max_tokens=3, logit_bias={7: -100.0, 300: 2.5}, stop_ids=[9], **said)
        await cluster.generate(text="x", max_tokens=3, ignore_eos=True, repetition_penalty=0.01)
        full, other = cluster.lanes[0].requests
        assert {name: getattr(full.sampling, name) for name in said} == said
        assert dict(full.sampling.logit_bias) == {7: -100.0, 300: 2.5}
        assert (list(full.stop_ids), list(other.stop_ids)) == ([2, 9], [])
