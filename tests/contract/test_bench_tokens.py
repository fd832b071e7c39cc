"""Load in token ids over the real gRPC door, on simulated lanes: what is read of an answer, and what goes wrong."""

import asyncio
import contextlib
import json

import pytest

from bench.__main__ import run_main
from bench.load.token_door import ASTRAY, TokenServer
from bench.load.walked import follower, walk_of
from tests.fakes.doors import open_doors
from tests.fakes.lane import Script

PATH = walk_of("small")
VOCABULARY = len(PATH.topic_of)
PROMPT = PATH.stretch(5, 9)


@contextlib.asynccontextmanager
async def served(folder, tokens=(), **more):
    async with open_doors(folder, script=Script(tokens=tuple(tokens), **more), vocab_size=VOCABULARY) as cluster:
        yield cluster, str(cluster.doors.grpc)


async def one(address, prompt=PROMPT, max_tokens=6, timeout_s=60.0):
    server = TokenServer(address, "fake", follow=follower(PATH))
    messages = [{"role": "system", "content": tuple(prompt[:4])}, {"role": "user", "content": tuple(prompt[4:])}]
    async with server.client() as client:
        return await server.ask(client, messages, key="k", session="s", max_tokens=max_tokens, timeout_s=timeout_s)


async def test_an_answer_along_the_walk_is_read_with_its_times_lane_and_counts(tmp_path):
    async with served(tmp_path, PATH.stretch(14, 6)) as (cluster, address):
        reply = await one(address)
        assert (reply.error, reply.tokens, reply.prompt_tokens) == (None, 6, 9)
        assert list(reply.text) == PATH.stretch(14, 6)
        assert reply.begin_s < reply.pieces[0][0] <= reply.pieces[-1][0] <= reply.end_s
        (lane,) = [lane for lane in cluster.lanes if lane.requests]
        assert reply.lane == lane.name
        assert list(lane.requests[0].prompt_ids) == PROMPT
        assert list(lane.requests[0].stop_ids) == []  # the answer has the length that was asked for
        told = await TokenServer(address, "").told()
        assert set(told["lanes"]) == {"lane-0", "lane-1"}


async def test_an_answer_that_leaves_the_walk_is_an_error(tmp_path):
    wrong = PATH.stretch(14, 6)
    wrong[5] = PATH.stretch(100, 1)[0]
    async with served(tmp_path, wrong) as (_, address):
        assert (await one(address)).error == ASTRAY
        assert (await one(address, max_tokens=5)).error is None


async def test_refusals_lost_lanes_and_silence_are_replies_with_an_error(tmp_path):
    async with served(tmp_path, PATH.stretch(14, 6), fault="error", fault_after=2) as (_, address):
        broken = await one(address)  # two tokens of each lane
        assert (broken.error, broken.tokens) == ("lane_failed", 4)
        assert (await one(address, [*PROMPT, VOCABULARY])).error == "token_out_of_range"
    assert (await one("127.0.0.1:1")).error == "unavailable"
    (tmp_path / "slow").mkdir()
    async with served(tmp_path / "slow", PATH.stretch(14, 6), token_delay_s=60.0) as (_, address):
        assert (await one(address, timeout_s=0.3)).error == "deadline_exceeded"


async def test_a_report_in_token_ids(tmp_path, capsys):
    async with served(tmp_path, PATH.stretch(14, 6)) as (cluster, address):
        words = ["run", "--grpc", address, "--walk", "small", "--workload", "question", "--scale", "0.05", "--json",
                 "--concurrency", "1,2", "--seconds", "1,1.5", "--window", "1,1.25", "--warm-up", "0"]  # fmt: skip
        assert await asyncio.to_thread(run_main, words) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["conditions"]["walk"] == "small"
        assert report["conditions"]["seconds"] == [1.0, 1.5]
        assert report["conditions"]["min_window_s"] == [1.0, 1.25]
        assert report["server"]["url"] == f"grpc://{address}"
        assert set(report["server"]["lanes"]) == {"lane-0", "lane-1"}
        for run in report["runs"].values():  # these lanes do not know the walk
            assert set(run["figures"]["errors"]) == {ASTRAY}
        assert all(max(request.prompt_ids) < VOCABULARY for lane in cluster.lanes for request in lane.requests)


@pytest.mark.parametrize(
    "words",
    [[], ["--grpc", "127.0.0.1:1"], ["--walk", "small"], ["--url", "x", "--walk", "small"],
     ["--url", "x", "--grpc", "127.0.0.1:1", "--walk", "small"], ["--url", "x", "--seconds", "1,2,3"],
     ["--url", "x", "--window", "0.5"], ["--url", "x", "--seconds", "nan"], ["--url", "x", "--seconds", "86401"],
     ["--url", "x", "--seconds", ""]],
)  # fmt: skip
def test_wrong_words_are_told_before_anything_is_asked(capsys, words):
    assert run_main(["run", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: usage: ")


def test_nobody_at_the_grpc_door(capsys):
    assert run_main(["run", "--grpc", "127.0.0.1:1", "--walk", "small"]) == 1
    assert "error: unreachable: grpc://127.0.0.1:1: unavailable" in capsys.readouterr().err
