"""Lanes that die, refuse or report faults under real gRPC streams: one end for every request, and the right one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from coordinator import limits
from coordinator.errors import (
    CoordinatorError,
    LaneFailed,
    LaneLost,
    LaneRejected,
    Unsupported,
)
from coordinator.generation import Begun, Generation, Tokens
from laneproto.v1 import lane_pb2
from tests.fakes.dispatching import ENDLESS, fleet, made_up, read_all, request
from tests.fakes.doors import until
from tests.fakes.lane import Script, token_at


async def test_a_lane_that_came_back_is_another_lane_to_a_session(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script(), Script()) as (dispatcher, roster, lanes):
        first = dispatcher.submit(request(session="a"))
        await read_all(first)
        assert first.lane == "lane-0"
        roster.lose("lane-0")
        await lanes[0].restart()
        await roster.returned("lane-0")
        second = dispatcher.submit(request(session="a"))
        await read_all(second)
        assert second.lane == "lane-1"


@pytest.mark.parametrize("roster_first", [True, False])
async def test_a_lost_lanes_answer_goes_on_elsewhere_without_gap_or_duplicate(
    tmp_path: Path, roster_first: bool
) -> None:
    async with fleet(tmp_path, ENDLESS, ENDLESS) as (dispatcher, roster, lanes):
        doomed = dispatcher.submit(request((5,), 40))
        other = dispatcher.submit(request((6,), 60))
        assert await doomed.read() == Begun("lane-0")
        first = await doomed.read()
        assert isinstance(first, Tokens)
        if roster_first:
            roster.lose("lane-0")
        await lanes[0].crash()
        rest, end = await read_all(doomed)
        assert [token.id for token in first.tokens] + rest == made_up((5,), 40)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (1, 40)
        assert doomed.lane == "lane-1"
        assert lanes[1].requests[-1].replayed_tokens > 0
        ids, end = await read_all(other)
        assert ids == made_up((6,), 60)
        assert end.reason == lane_pb2.FINISH_REASON_LENGTH
        assert roster.suspects == ([] if roster_first else ["lane-0"])


async def test_a_request_that_has_not_begun_goes_to_another_lane(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script(), Script()) as (dispatcher, roster, lanes):
        await lanes[0].crash()  # the roster has not noticed yet
        generation = dispatcher.submit(request())
        ids, _ = await read_all(generation)
        assert ids == made_up((5,), 3)
        assert generation.lane == "lane-1"
        assert roster.suspects == ["lane-0"]


async def test_a_request_does_not_try_lanes_for_ever(tmp_path: Path) -> None:
    lost = [Script(fault="refuse", refuse_status=grpc.StatusCode.UNAVAILABLE, error_code="gone")] * 4
    async with fleet(tmp_path, *lost) as (dispatcher, _, lanes):
        doomed = dispatcher.submit(request())
        with pytest.raises(LaneLost, match="so did the lanes before"):
            await read_all(doomed)
        with pytest.raises(LaneLost):  # the same end, however often it is read
            await doomed.read()
        assert sum(len(lane.requests) for lane in lanes) == limits.REPLAYS + 1


async def test_an_answer_is_replayed_twice_and_not_three_times(tmp_path: Path) -> None:
    crash = Script(fault="crash", fault_after=2)
    async with fleet(tmp_path, crash, crash, Script(), Script()) as (dispatcher, _, lanes):
        ids, _ = await read_all(dispatcher.submit(request((5,), 9)))
        assert ids == made_up((5,), 9)
        assert [seen.replayed_tokens for lane in lanes for seen in lane.requests] == [0, 2, 4]
    (tmp_path / "again").mkdir()
    async with fleet(tmp_path / "again", crash, crash, crash, Script()) as (dispatcher, _, lanes):
        doomed = dispatcher.submit(request((5,), 9))
        with pytest.raises(LaneLost, match="after 6 tokens"):
            await read_all(doomed)
        assert lanes[3].requests == []


@pytest.mark.parametrize(("stop_ids", "reason"), [((2,), "LENGTH"), ((2, token_at((5,), 2)), "STOP")])
async def test_a_lane_lost_after_the_last_token_needs_no_replay(
    tmp_path: Path, stop_ids: tuple[int, ...], reason: str
) -> None:
    script = Script(tokens=tuple(made_up((5,), 4)), fault="crash", fault_after=3)
    async with fleet(tmp_path, script, Script()) as (dispatcher, _, lanes):
        ids, end = await read_all(dispatcher.submit(replace(request((5,), 3), stop_ids=stop_ids)))
        assert ids == made_up((5,), 3)
        assert lane_pb2.FinishReason.Name(end.reason) == f"FINISH_REASON_{reason}"
        assert end.usage.completion_tokens == 3
        assert lanes[1].requests == []


async def test_a_lane_that_says_it_is_at_fault_is_replaced_once(tmp_path: Path) -> None:
    faulty = Script(fault="error", fault_after=2)
    async with fleet(tmp_path, faulty, Script()) as (dispatcher, roster, lanes):
        ids, _ = await read_all(dispatcher.submit(request((5,), 9)))
        assert ids == made_up((5,), 9)
        assert roster.suspects == ["lane-0"]
    (tmp_path / "again").mkdir()
    async with fleet(tmp_path / "again", faulty, faulty, Script()) as (dispatcher, _, lanes):
        with pytest.raises(LaneFailed, match="non_finite_logits"):
            await read_all(dispatcher.submit(request((5,), 9)))
        assert lanes[2].requests == []  # what makes two lanes fail is not tried on all


@pytest.mark.parametrize(
    ("code", "seen", "words"), [("slow_reader", LaneFailed, "slow_reader"), ("bad_grammar", Unsupported, "schema")]
)
async def test_a_clients_fault_is_never_a_lanes(
    tmp_path: Path, code: str, seen: type[CoordinatorError], words: str
) -> None:
    async with fleet(tmp_path, Script(fault="error", error_code=code), Script()) as (dispatcher, roster, lanes):
        with pytest.raises(seen, match=words):
            await read_all(dispatcher.submit(request()))
        assert roster.suspects == []
        assert lanes[1].requests == []


async def test_a_lane_that_lives_gets_work_again_after_a_broken_stream(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script(fault="refuse", refuse_status=grpc.StatusCode.UNAVAILABLE, error_code="x")) as (
        dispatcher,
        _,
        lanes,
    ):
        generation = dispatcher.submit(request())
        await until(lambda: len(lanes[0].requests) == 1)
        lanes[0].script_next(fault="none")
        ids, _ = await read_all(generation)
        assert ids == made_up((5,), 3)


@pytest.mark.parametrize(
    ("status", "code"), [(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy"), (grpc.StatusCode.UNAVAILABLE, "draining")]
)
async def test_a_busy_lane_puts_the_request_back_at_the_head(
    tmp_path: Path, status: grpc.StatusCode, code: str
) -> None:
    busy = Script(fault="refuse", refuse_status=status, error_code=code)
    async with fleet(tmp_path, busy) as (dispatcher, roster, lanes):
        first, second = dispatcher.submit(request()), dispatcher.submit(request())
        await until(lambda: len(lanes[0].requests) >= 3)
        assert {seen.request_id for seen in lanes[0].requests} == {first.request.id}
        lanes[0].script_next(fault="none")
        await read_all(first)
        await read_all(second)
        await until(lambda: len(lanes[0].ended) == 2)
        assert [request_id for request_id, _ in lanes[0].ended] == [first.request.id, second.request.id]
        assert roster.suspects == []


async def test_the_lanes_own_refusals_and_failures_are_typed(tmp_path: Path) -> None:
    refusal = Script(fault="refuse", refuse_status=grpc.StatusCode.INVALID_ARGUMENT, error_code="bad_sampling")
    async with fleet(tmp_path, refusal) as (dispatcher, roster, lanes):
        with pytest.raises(LaneRejected, match="bad_sampling"):
            await read_all(dispatcher.submit(request()))
        lanes[0].script_next(fault="error", fault_after=1, error_code="non_finite_logits")
        with pytest.raises(LaneFailed, match="non_finite_logits"):
            await read_all(dispatcher.submit(request((5,), 9)))
        assert roster.suspects == ["lane-0"] * 2
        lanes[0].script_next(fault="break", fault_after=1)
        with pytest.raises(LaneLost, match="after 3 tokens"):
            await read_all(dispatcher.submit(request((5,), 9)))
        lanes[0].script_next(fault="none")
        await read_all(dispatcher.submit(request()))


async def test_one_end_for_each_of_many_requests_whatever_dies(tmp_path: Path) -> None:
    script = Script(token_delay_s=0.001)
    async with fleet(tmp_path, script, script, script) as (dispatcher, roster, lanes):
        generations = [dispatcher.submit(request((5 + n,), 20, session=f"s{n % 5}")) for n in range(60)]

        async def outcome(generation: Generation) -> str:
            try:
                ids, end = await read_all(generation)
            except CoordinatorError as error:
                return error.code
            if end.reason == lane_pb2.FINISH_REASON_LENGTH:
                assert ids == made_up(generation.request.prompt_ids, 20)
            return lane_pb2.FinishReason.Name(end.reason)

        async def trouble() -> None:
            for round_number in range(6):
                await asyncio.sleep(0.05)
                victim = lanes[round_number % 3]
                await victim.crash()
                if round_number % 2:
                    roster.lose(victim.name)
                generations[-1 - round_number].cancel()
                await victim.restart()
                await roster.returned(victim.name)

        outcomes, _ = await asyncio.gather(asyncio.gather(*map(outcome, generations)), trouble())
        assert set(outcomes) <= {"FINISH_REASON_LENGTH", "FINISH_REASON_CANCELLED", "lane_lost", "cancelled"}
        assert outcomes.count("FINISH_REASON_LENGTH") > 45
        assert outcomes.count("lane_lost") <= 2  # at most six losses, three under one request
        assert dispatcher.queued == 0
