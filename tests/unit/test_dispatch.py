"""Dispatch over real gRPC on simulated lanes: placement, order, and one end for every request whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import limits
from coordinator.dispatch import Dispatcher
from coordinator.errors import (
    Cancelled,
    Closing,
    CoordinatorError,
    DeadlineExceeded,
    LaneFailed,
    LaneLost,
    LaneRejected,
    LaneTimeout,
    NoLane,
    QueueFull,
    SlowReader,
    TenantBusy,
    Unsupported,
)
from coordinator.fleet.lane_view import PrefixNews
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from coordinator.request import Request
from coordinator.sampling import Sampling
from coordinator.tenants import ANYONE, Tenant
from laneproto.chain import chain
from laneproto.v1 import lane_pb2
from tests.fakes.doors import until
from tests.fakes.lane import FakeLane, Script, token_at
from tests.fakes.roster import FakeRoster

_ids = iter(range(1_000_000))


def request(prompt: tuple[int, ...] = (5,), max_tokens: int = 3, session: str | None = None, **more: Any) -> Request:
    return Request(f"r{next(_ids)}", prompt, max_tokens, Sampling(0.0, 0, 1.0, 0), (2,), (), False, 0, session, **more)


@contextlib.asynccontextmanager
async def fleet(
    directory: Path, *scripts: Script, queue_bound: int = 256
) -> AsyncIterator[tuple[Dispatcher, FakeRoster, list[FakeLane]]]:
    lanes = [FakeLane(directory / f"{k}.sock", name=f"lane-{k}", script=script) for k, script in enumerate(scripts)]
    for lane in lanes:
        await lane.start()
    roster = FakeRoster(*lanes)
    dispatcher = Dispatcher(roster, queue_bound=queue_bound)
    try:
        yield dispatcher, roster, lanes
    finally:
        await dispatcher.close()
        assert not dispatcher._tasks
        assert not dispatcher._entries
        assert not dispatcher._runs
        await roster.close()
        for lane in lanes:
            await lane.stop()


async def read_all(generation: Generation) -> tuple[list[int], Ended]:
    """All token ids and the end; raises the error that ended it."""
    ids: list[int] = []
    async with asyncio.timeout(60):
        while True:
            match await generation.read():
                case Begun():
                    assert not ids
                case Tokens(tokens):
                    ids += [token.id for token in tokens]
                case Ended() as end:
                    return ids, end


def made_up(prompt: tuple[int, ...], count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]


SLOW = Script(token_delay_s=0.02)
ENDLESS = Script(token_delay_s=0.005)


async def test_one_request_from_begin_to_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script()) as (dispatcher, _, lanes):
        generation = dispatcher.submit(request((5, 6), 4))
        ids, end = await read_all(generation)
        assert ids == made_up((5, 6), 4)
        assert end.reason == lane_pb2.FINISH_REASON_LENGTH
        assert end.usage.completion_tokens == 4
        assert lanes[0].requests[0].request_id == generation.request.id
        await until(lambda: dispatcher.running("lane-0") == 0)


async def test_never_two_on_one_lane_and_in_order_of_arrival(tmp_path: Path) -> None:
    async with fleet(tmp_path, SLOW) as (dispatcher, _, lanes):
        waiting = [dispatcher.submit(request((5,), 3)) for _ in range(4)]
        assert dispatcher.running("lane-0") == 1  # counted at dispatch, before the lane has answered
        assert dispatcher.queued == 3
        assert [dispatcher.position(generation) for generation in waiting] == [None, 0, 1, 2]
        for generation in waiting:
            await read_all(generation)
        assert [seen.request_id for seen in lanes[0].requests] == [generation.request.id for generation in waiting]
        assert all(reason == lane_pb2.FINISH_REASON_LENGTH for _, reason in lanes[0].ended)


async def test_the_queue_has_a_bound_and_leaving_frees_a_place(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS, queue_bound=2) as (dispatcher, _, _lanes):
        running = dispatcher.submit(request((5,), 1000))
        first, second = dispatcher.submit(request()), dispatcher.submit(request())
        with pytest.raises(QueueFull):
            dispatcher.submit(request())
        first.cancel()
        assert dispatcher.queued == 1
        assert dispatcher.position(second) == 0
        with pytest.raises(Cancelled):
            await first.read()
        third = dispatcher.submit(request())
        running.cancel()
        await read_all(second)
        await read_all(third)


async def test_idle_lanes_take_turns_and_work_spreads(tmp_path: Path) -> None:
    async with fleet(tmp_path, *[Script()] * 3) as (dispatcher, _, lanes):
        for _ in range(6):
            await read_all(dispatcher.submit(request()))
        assert [len(lane.requests) for lane in lanes] == [2, 2, 2]
    (tmp_path / "at-once").mkdir()
    async with fleet(tmp_path / "at-once", *[SLOW] * 3) as (dispatcher, _, lanes):
        await asyncio.gather(*(read_all(dispatcher.submit(request())) for _ in range(3)))
        assert [len(lane.requests) for lane in lanes] == [1, 1, 1]


async def test_a_session_returns_to_its_lane_while_it_is_free(tmp_path: Path) -> None:
    async with fleet(tmp_path, *[Script()] * 3) as (dispatcher, _, lanes):
        homes = {}
        for name in ("a", "b", "c"):
            generation = dispatcher.submit(request(session=name))
            await read_all(generation)
            homes[name] = generation.lane
        assert len(set(homes.values())) == 3
        for name in ("c", "a", "a", "b", "c"):
            generation = dispatcher.submit(request(session=name))
            await read_all(generation)
            assert generation.lane == homes[name]
        lanes[0].script_next(token_delay_s=0.01)
        lanes[1].script_next(token_delay_s=0.01)
        lanes[2].script_next(token_delay_s=0.01)
        busy = dispatcher.submit(request((5,), 1000, session="a"))
        await busy.read()
        away = dispatcher.submit(request(session="a"))
        await read_all(away)
        assert away.lane not in (None, homes["a"])  # its own lane was busy, another was free
        busy.cancel()


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


async def test_cancel_frees_the_lane_within_a_step(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, roster, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        assert await generation.read() == Begun("lane-0")
        await generation.read()
        generation.cancel()
        while not isinstance(end := await generation.read(), Ended):
            pass
        assert end.reason == lane_pb2.FINISH_REASON_CANCELLED
        await until(lambda: lanes[0].ended == [(generation.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        assert lanes[0].counters.generated_tokens < 1000
        await until(lambda: dispatcher.running("lane-0") == 0)
        await read_all(dispatcher.submit(request()))
        assert roster.suspects == []


async def test_cancel_before_the_lane_has_accepted(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script(prefill_delay_s=5.0)) as (dispatcher, _, lanes):
        generation = dispatcher.submit(request())
        generation.cancel()  # overtakes its own Generate
        with contextlib.suppress(Cancelled):
            await read_all(generation)
        await until(lambda: dispatcher.running("lane-0") == 0)
        assert [reason for _, reason in lanes[0].ended] in ([], [lane_pb2.FINISH_REASON_CANCELLED])


async def test_a_lane_that_does_not_confirm_is_suspect_and_gets_no_more_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CANCEL_CONFIRM_S", 0.1)
    async with fleet(tmp_path, Script(token_delay_s=0.01, ignore_cancel=True)) as (dispatcher, roster, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        await generation.read()
        generation.cancel()
        with pytest.raises(LaneTimeout):
            await read_all(generation)
        await until(lambda: roster.suspects == ["lane-0"])
        following = dispatcher.submit(request())
        await asyncio.sleep(0.05)
        assert dispatcher.running("lane-0") == 1  # the place stays taken
        assert dispatcher.position(following) == 0
        roster.lose("lane-0")  # the fleet killed it
        assert dispatcher.position(following) == 0
        await lanes[0].restart(Script())
        await roster.returned("lane-0")
        ids, _ = await read_all(following)
        assert ids == made_up((5,), 3)


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


async def test_a_request_ends_at_its_own_time_in_the_queue_and_on_a_lane(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, _, lanes):
        running = dispatcher.submit(request((5,), 4000, timeout_s=0.3))
        waiting = dispatcher.submit(request((6,), 4000, timeout_s=0.1))
        with pytest.raises(DeadlineExceeded):
            await read_all(waiting)
        assert dispatcher.queued == 0
        with pytest.raises(DeadlineExceeded):
            await read_all(running)
        await until(lambda: lanes[0].ended == [(running.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        await until(lambda: dispatcher.running("lane-0") == 0)
    (tmp_path / "again").mkdir()
    async with fleet(tmp_path / "again", Script(prefill_delay_s=60)) as (dispatcher, _, lanes):
        with pytest.raises(DeadlineExceeded):  # in prefill
            await read_all(dispatcher.submit(request((5,), 4000, timeout_s=0.1)))
        await until(lambda: dispatcher.running("lane-0") == 0)


async def test_a_prompt_goes_to_the_lane_that_says_it_remembers_its_beginning(tmp_path: Path) -> None:
    prompt = tuple(range(5, 205))
    async with fleet(tmp_path, *[Script()] * 3) as (dispatcher, roster, lanes):
        known = chain(prompt, ANYONE.salt)
        seat = Seat("lane-2", lanes[2].incarnation)
        roster.tell(PrefixNews(seat, [Prefix(known[2], 192)], [], anew=True))
        for _ in range(2):
            generation = dispatcher.submit(request(prompt))
            await read_all(generation)
            assert generation.lane == "lane-2"
        roster.tell(PrefixNews(seat, [], [Prefix(known[2], 192)], anew=False))
        generation = dispatcher.submit(request(prompt))
        await read_all(generation)
        assert generation.lane != "lane-2"  # whose turns are over


async def test_quotas_are_the_tenants_and_end_with_their_requests(tmp_path: Path) -> None:
    one = Tenant("one", concurrency=1)
    async with fleet(tmp_path, ENDLESS) as (dispatcher, _, _lanes):
        running = dispatcher.submit(request((5,), 4000, tenant=one))
        with pytest.raises(TenantBusy):
            dispatcher.submit(request(tenant=one))
        other = dispatcher.submit(request())
        running.cancel()
        await read_all(other)
        await read_all(dispatcher.submit(request(tenant=one)))


async def test_a_refusal_says_when_there_may_be_room(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS, queue_bound=1) as (dispatcher, _, _lanes):
        running, waiting = dispatcher.submit(request((5,), 4000)), dispatcher.submit(request((5,), 4000))
        with pytest.raises(QueueFull) as error:
            dispatcher.submit(request())
        assert limits.RETRY_AFTER_S <= error.value.retry_after_s <= limits.RETRY_AFTER_MAX_S
        assert dispatcher.expected_wait_s(waiting) > 0
        assert dispatcher.expected_wait_s(running) is None
        waiting.cancel()
        running.cancel()


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


async def test_a_reader_that_stopped_ends_its_request_and_frees_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUFFERED_TOKENS", 8)
    async with fleet(tmp_path, Script()) as (dispatcher, _, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        await until(lambda: dispatcher.running("lane-0") == 0)
        await until(lambda: [reason for _, reason in lanes[0].ended] == [lane_pb2.FINISH_REASON_CANCELLED])
        assert await generation.read() == Begun("lane-0")
        event = await generation.read()
        assert isinstance(event, Tokens)
        assert [token.id for token in event.tokens] == made_up((5,), 8)
        with pytest.raises(SlowReader):
            await generation.read()


async def test_without_hope_requests_are_refused_and_waiting_ones_too(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, roster, _):
        running = dispatcher.submit(request((5,), 4000))
        waiting = dispatcher.submit(request())
        await running.read()
        roster.set_state("lane-0", "draining")
        with pytest.raises(NoLane):
            await waiting.read()
        with pytest.raises(NoLane):
            dispatcher.submit(request())
        assert isinstance(await running.read(), Tokens)  # a draining lane finishes what it runs
        running.cancel()


@pytest.mark.parametrize("state", ["starting", "warming", "suspect", "dead"])
async def test_requests_wait_for_a_lane_that_may_come(tmp_path: Path, state: str) -> None:
    async with fleet(tmp_path, Script()) as (dispatcher, roster, _):
        roster.set_state("lane-0", state)  # type: ignore[arg-type]
        waiting = dispatcher.submit(request())
        await asyncio.sleep(0.02)
        assert dispatcher.position(waiting) == 0
        roster.set_state("lane-0", "ready")
        await read_all(waiting)


async def test_closing_gives_everything_an_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, _, lanes):
        running, waiting = dispatcher.submit(request((5,), 4000)), dispatcher.submit(request())
        await running.read()
        await dispatcher.close()
        for generation in (running, waiting):
            with pytest.raises(Closing):
                await read_all(generation)
        await until(lambda: lanes[0].ended == [(running.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        with pytest.raises(Closing):
            dispatcher.submit(request())


async def test_closing_with_grace_lets_running_requests_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, SLOW) as (dispatcher, _, _lanes):
        running = dispatcher.submit(request((5,), 5))
        await running.read()
        await dispatcher.close(grace_s=10)
        assert (await read_all(running))[0] == made_up((5,), 5)


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
