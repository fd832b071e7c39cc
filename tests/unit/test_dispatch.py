"""Dispatch over real gRPC on simulated lanes: who is placed where, who waits, who is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator import limits
from coordinator.errors import (
    Cancelled,
    NoLane,
    QueueFull,
    TenantBusy,
)
from coordinator.fleet.lane_view import PrefixNews
from coordinator.generation import Tokens
from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from coordinator.tenants import ANYONE, Tenant
from laneproto.chain import chain
from laneproto.v1 import lane_pb2
from tests.fakes.dispatching import ENDLESS, SLOW, fleet, made_up, read_all, request
from tests.fakes.doors import until
from tests.fakes.lane import Script


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
