"""Model-checked histories: many requests under random faults through the real dispatcher, on a virtual clock.

EXPRESSWAY_HISTORY_REQUESTS=1000000 makes it the long run whose figures are in bench/LOG.md.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
from dataclasses import dataclass, field

import pytest
import structlog

from coordinator import limits
from coordinator.dispatch import Dispatcher
from coordinator.errors import CoordinatorError, Refused
from coordinator.generation import Begun, Ended, Generation, Tokens
from coordinator.request import Request
from coordinator.sampling import Sampling
from coordinator.tenants import Priority, Tenant
from laneproto.v1 import lane_pb2
from tests.fakes.lane import token_at
from tests.fakes.simulation import Costs, Scenario, SimLane, SimRoster
from tests.fakes.virtual import run_virtual

REQUESTS = int(os.environ.get("EXPRESSWAY_HISTORY_REQUESTS", "3000"))
PART = 50_000  # of one cluster's life
QUIET = structlog.make_filtering_bound_logger(50)

# What a request may end with under these faults, beside a complete answer.
ENDS = {
    "FINISH_REASON_LENGTH",
    "FINISH_REASON_CANCELLED",
    "cancelled",
    "deadline_exceeded",
    "lane_lost",
    "lane_failed",
    "lane_timeout",
    "queue_full",
}


@dataclass
class History:
    """What was seen of all requests."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    longest_wait_s: float = 0.0  # of the classes that batch stands behind
    longest_batch_wait_s: float = 0.0
    replays: int = 0
    visits: int = 0


async def read(generation: Generation, history: History, submitted: float) -> None:
    """Reads one request to its end and checks everything that a client could see."""
    request, ids, begun = generation.request, [], 0
    loop = asyncio.get_running_loop()
    try:
        while True:
            match await generation.read():
                case Begun():
                    begun += 1
                    assert not ids
                    waited_s = loop.time() - submitted
                    if request.priority is Priority.BATCH:
                        history.longest_batch_wait_s = max(history.longest_batch_wait_s, waited_s)
                    else:
                        history.longest_wait_s = max(history.longest_wait_s, waited_s)
                case Tokens(tokens):
                    assert begun == 1
                    ids += [token.id for token in tokens]
                case Ended() as end:
                    break
    except CoordinatorError as error:
        history.ends[error.code] += 1
        with pytest.raises(type(error)):  # the one end, however often it is read
            await generation.read()
    else:
        assert await generation.read() is end
        if end.reason == lane_pb2.FINISH_REASON_LENGTH:
            # what a lane sent after the client had left is not kept, though the lane's end may come before the cancel
            assert generation.cancel_wanted.is_set() or len(ids) == request.max_tokens
            assert end.usage.completion_tokens == request.max_tokens
        else:
            assert end.reason == lane_pb2.FINISH_REASON_CANCELLED
            assert generation.cancel_wanted.is_set()
        history.ends[lane_pb2.FinishReason.Name(end.reason)] += 1
    # no gap and no duplicate, wherever it ended
    assert ids == [token_at(request.prompt_ids, index) for index in range(len(ids))]


async def play(scenario: Scenario, history: History) -> None:
    chance = random.Random(scenario.seed)
    lanes = [SimLane(f"lane-{k}", scenario.costs, random.Random(scenario.seed + k)) for k in range(scenario.lanes)]
    roster = SimRoster(lanes)
    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(roster, clock=loop.time)  # type: ignore[arg-type]
    tenants = [Tenant(f"t{k}", Priority.INTERACTIVE, queue_requests=64) for k in range(scenario.tenants)]
    readers: set[asyncio.Task[None]] = set()
    for number in range(scenario.requests):
        await asyncio.sleep(chance.expovariate(scenario.rate_per_s))
        tenant = chance.choice(tenants)
        most = scenario.prompt_tokens * (100 if chance.random() < scenario.long_prompts else 1)
        request = Request(
            f"r{number}",
            tuple(chance.randrange(3, 256) for _ in range(chance.randint(1, most))),
            chance.randint(1, scenario.max_tokens),
            Sampling(0.0, 0, 1.0, 0), (2,), (), False, 0, f"s{chance.randrange(scenario.sessions)}",
            tenant=tenant, priority=chance.choice(list(Priority)),
            timeout_s=chance.uniform(0.1, 5.0) if chance.random() < scenario.timeout_chance else 3600.0,
        )  # fmt: skip
        try:
            generation = dispatcher.submit(request)
        except Refused as error:
            history.ends[error.code] += 1
            continue
        if chance.random() < scenario.cancel_chance:
            loop.call_later(chance.uniform(0.0, 3.0), generation.cancel)
        task = loop.create_task(read(generation, history, loop.time()))
        readers.add(task)
        task.add_done_callback(lambda done: (readers.discard(done), done.result()))
    while readers:
        await asyncio.wait(readers)
    history.replays = sum(lane.replays for lane in lanes)
    history.visits = sum(lane.visits for lane in lanes)
    assert max(lane.longest_wait_chunks for lane in lanes) <= 2
    assert dispatcher.queued == 0
    while any(dispatcher.running(lane.name) for lane in lanes):
        await asyncio.sleep(1.0)
    await dispatcher.close()
    assert not dispatcher._entries
    assert not len(dispatcher._tasks)


def run(scenario: Scenario) -> History:
    history = History()
    structlog.configure(wrapper_class=QUIET)
    try:
        run_virtual(play(scenario, history))
    finally:
        structlog.reset_defaults()
    assert sum(history.ends.values()) == scenario.requests  # exactly one end for each
    assert history.ends.keys() <= ENDS
    return history


@pytest.mark.timeout(0 if REQUESTS > PART else 300)
@pytest.mark.parametrize("part", range(-(-REQUESTS // PART)))
def test_one_end_no_gap_no_duplicate_no_starvation_under_random_faults(part: int) -> None:
    count = min(PART, REQUESTS - part * PART)
    history = run(Scenario(count, seed=1000 + part, costs=Costs(fault_chance=0.08)))
    waits = f"longest wait {history.longest_wait_s:.1f} s, of batch {history.longest_batch_wait_s:.1f} s"
    print(dict(history.ends), f"replays {history.replays}, {waits}", flush=True)
    assert history.ends["FINISH_REASON_LENGTH"] > 0.8 * count
    assert history.replays > 0.005 * count
    # the queue is stable at this load: a request that waits for long has been starved; a line of batch requests is
    # served when nobody else waits, or one of a tenant every two ageings
    assert history.longest_wait_s < 5 * limits.AGEING_S
    assert history.longest_batch_wait_s < 20 * limits.AGEING_S


@pytest.mark.parametrize("seed", range(3))
def test_overloaded_and_at_fault_all_the_time(seed: int) -> None:
    history = run(Scenario(400, seed=seed, rate_per_s=40.0, lanes=2, costs=Costs(fault_chance=0.3)))
    assert history.ends["queue_full"] > 0
    assert history.ends["FINISH_REASON_LENGTH"] > 0


def test_without_faults_everybody_is_served() -> None:
    history = run(Scenario(500, cancel_chance=0.0, timeout_chance=0.0, rate_per_s=2.0))
    assert history.ends == {"FINISH_REASON_LENGTH": 500}
    assert history.replays == 0


@pytest.mark.parametrize("seed", range(3))
def test_short_requests_visit_long_ones_and_nobody_is_starved_whatever_fails(seed: int) -> None:
    costs = Costs(decode_s=0.01, fault_chance=0.05 if seed else 0.0)
    history = run(Scenario(600, seed=seed, rate_per_s=2.0, lanes=2, costs=costs, long_prompts=0.15))
    print(dict(history.ends), f"visits {history.visits}, longest wait {history.longest_wait_s:.1f} s", flush=True)
    assert history.visits > 20
    assert history.ends["FINISH_REASON_LENGTH"] > 0.8 * 600
    assert history.longest_wait_s < 10 * limits.AGEING_S
