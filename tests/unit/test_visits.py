"""Who may interrupt whose reading, and what the dispatcher makes of it on simulated lanes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.dispatch import Dispatcher
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.policy.visits import Reading, choose
from coordinator.request import Request
from coordinator.sampling import Sampling
from coordinator.tenants import ANYONE, Priority
from tests.fakes.lane import token_at
from tests.fakes.simulation import Costs, SimLane, SimRoster
from tests.fakes.virtual import run_virtual

READING = Reading(Priority.DEFAULT, 100.0, 120.0, 0.0)

# --- the rule


def test_work_at_the_limit_and_past_it() -> None:
    most = limits.VISIT_WORK * READING.left_s
    assert choose({"a": READING}, {"a": most}, Priority.DEFAULT)
    assert not choose({"a": READING}, {"a": most * 1.0001}, Priority.DEFAULT)


def test_visits_at_the_limit_and_past_it() -> None:
    reading = Reading(Priority.DEFAULT, 100.0, 1000.0, 100.0 * limits.VISITS - 5.0)
    visit = choose({"a": reading}, {"a": 5.0}, Priority.DEFAULT)
    assert visit
    assert visit.alone_s == 5.0, "no more than what is left"
    assert not choose({"a": reading}, {"a": 5.001}, Priority.DEFAULT)


def test_a_visitor_has_a_little_more_than_it_is_expected_to_take() -> None:
    visit = choose({"a": READING}, {"a": 3.0}, Priority.DEFAULT)
    assert visit
    assert visit.alone_s == 3.0 * limits.VISIT_ALONE


@pytest.mark.parametrize("reading", list(Priority))
@pytest.mark.parametrize("visitor", list(Priority))
def test_no_class_interrupts_a_better_one(reading: Priority, visitor: Priority) -> None:
    found = choose({"a": Reading(reading, 100.0, 120.0, 0.0)}, {"a": 1.0}, visitor)
    assert bool(found) == (visitor <= reading)


readings = st.builds(
    Reading, st.sampled_from(Priority), st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.0, 1e3)
)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(readings, st.floats(1e-3, 1e3))), st.sampled_from(Priority))
def test_the_choice_is_allowed_is_the_quickest_and_does_not_depend_on_order(
    seen: dict[str, tuple[Reading, float]], priority: Priority
) -> None:
    held = {name: reading for name, (reading, _) in seen.items()}
    works = {name: work for name, (_, work) in seen.items()}
    visit = choose(held, works, priority)
    assert visit == choose(dict(reversed(held.items())), works, priority)
    alone = {name for name in held if choose({name: held[name]}, works, priority)}
    assert (visit is None) == (not alone)
    if visit is not None:
        assert works[visit.host] == min(works[name] for name in alone)
        assert held[visit.host].visits_s + visit.alone_s <= limits.VISITS * held[visit.host].read_s * (1 + 1e-9)


# --- the dispatcher

_ids = iter(range(1_000_000))


def request(prompt_tokens: int, max_tokens: int = 8, priority: Priority = Priority.DEFAULT) -> Request:
    prompt = tuple(3 + (k * 7) % 250 for k in range(prompt_tokens))
    return Request(
        f"r{next(_ids)}", prompt, max_tokens, Sampling(0.0, 0, 1.0, 0), (2,), (), False, 0, None,
        tenant=ANYONE, priority=priority,
    )  # fmt: skip


async def first_token_s(generation: Generation) -> float:
    """Reads it to its end; seconds until its first token came."""
    loop, ids, first = asyncio.get_running_loop(), [], None
    began = loop.time()
    while True:
        match await generation.read():
            case Begun():
                pass
            case Tokens(tokens):
                first = loop.time() - began if first is None else first
                ids += [token.id for token in tokens]
            case Ended():
                break
    wanted = generation.request
    assert ids == [token_at(wanted.prompt_ids, index) for index in range(wanted.max_tokens)]
    assert first is not None
    return first


def on_lanes(count: int, costs: Costs, play: Callable[[Dispatcher, list[SimLane]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        lanes = [SimLane(f"lane-{k}", costs, random.Random(k)) for k in range(count)]
        dispatcher = Dispatcher(SimRoster(lanes), clock=asyncio.get_running_loop().time)  # type: ignore[arg-type]
        await play(dispatcher, lanes)
        await dispatcher.close()

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        run_virtual(main())
    finally:
        structlog.reset_defaults()


COSTS = Costs(prefill_s=0.001, decode_s=0.01, chunk_rows=2048)
CHUNK_S = COSTS.prefill_s * COSTS.chunk_rows


@pytest.mark.parametrize("after_s", [0.0, 1.0, 30.0, 90.0])
def test_a_short_request_behind_100k_tokens_waits_two_chunks_at_most(after_s: float) -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(100_000))))
        await asyncio.sleep(after_s)
        assert await first_token_s(dispatcher.submit(request(200))) <= 2 * CHUNK_S + 0.2 + 0.05
        assert await long <= 100.0 + 0.3 + 1.0
        assert lanes[0].visits == 1

    on_lanes(1, COSTS, play)


def test_any_number_of_short_requests_delays_a_long_one_by_no_more_than_the_bound() -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        loop = asyncio.get_running_loop()
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(50_000))))
        others = set()
        while not long.done():
            await asyncio.sleep(0.5)
            if dispatcher.queued < 16:
                others.add(loop.create_task(first_token_s(dispatcher.submit(request(300, 32)))))
        assert long.result() <= 50.0 * (1 + limits.VISITS) + CHUNK_S
        assert long.result() > 50.0 * (1 + limits.VISITS / 2), "they did visit, one after the other"
        assert lanes[0].visits > 10
        await asyncio.gather(*others)

    on_lanes(1, COSTS, play)


def test_a_visitor_that_writes_on_and_on_shares_the_lane() -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(80_000))))
        await asyncio.sleep(1.0)
        short = dispatcher.submit(request(10, 60_000))  # ten minutes; answers were of 256 tokens so far
        visitor = asyncio.ensure_future(first_token_s(short))
        assert await long <= (2 + limits.VISITS) * 80.0
        assert 3000 < short.tokens_seen < 60_000
        assert await visitor < 2 * CHUNK_S + 1.0
        assert lanes[0].visits == 1

    on_lanes(1, COSTS, play)


def test_a_batch_request_waits_for_the_end() -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(20_000))))
        await asyncio.sleep(1.0)
        batch = dispatcher.submit(request(10, priority=Priority.BATCH))
        assert await first_token_s(batch) > 15.0
        await long
        assert lanes[0].visits == 0

    on_lanes(1, COSTS, play)


def test_a_free_lane_is_better_than_a_visit() -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(20_000))))
        await asyncio.sleep(1.0)
        await first_token_s(dispatcher.submit(request(10)))
        await long
        assert sum(lane.visits for lane in lanes) == 0

    on_lanes(2, COSTS, play)


def test_a_lane_that_takes_no_visitor_any_more_keeps_the_request_first_in_line() -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        lanes[0]._may_visit = lambda request: False  # type: ignore[method-assign]
        long = asyncio.ensure_future(first_token_s(dispatcher.submit(request(20_000))))
        await asyncio.sleep(1.0)
        short = dispatcher.submit(request(10))
        await asyncio.sleep(1.0)
        assert dispatcher.position(short) == 0
        assert not dispatcher._resting._seats, "the lane is as well as before"
        await first_token_s(short)
        await long

    on_lanes(1, COSTS, play)


@pytest.mark.parametrize("whose", ["long", "short"])
def test_a_cancel_of_either_leaves_the_other_alone(whose: str) -> None:
    async def play(dispatcher: Dispatcher, lanes: list[SimLane]) -> None:
        long = dispatcher.submit(request(20_000))
        reading = asyncio.ensure_future(first_token_s(long))
        await asyncio.sleep(1.0)
        short = dispatcher.submit(request(500, 30))
        visiting = asyncio.ensure_future(first_token_s(short))
        await asyncio.sleep(CHUNK_S - 0.7)  # in the middle of the visit
        assert [run.request_id for run in lanes[0].running] == [long.request.id, short.request.id]
        (long if whose == "long" else short).cancel()
        done, _ = await asyncio.wait([reading, visiting])
        failed = [task for task in done if task.exception()]
        assert failed == [reading if whose == "long" else visiting]

    on_lanes(1, COSTS, play)
