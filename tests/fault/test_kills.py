"""Real requests over real lane processes that are killed and started again: one end each, no gap, no duplicate.

EXPRESSWAY_KILLED_REQUESTS=1000 makes it the long run whose figures are in bench/LOG.md.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.dispatch import Dispatcher
from coordinator.errors import Cancelled, CoordinatorError
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.states import FleetLimits
from coordinator.generation import Generation
from laneproto.v1 import lane_pb2
from tests.fakes.dispatching import made_up, read_all, request
from tests.fault.test_fleet_processes import fake_lane, folder, states, supervised, until
from tests.fault.test_operations import operated

assert folder  # a fixture

REQUESTS = int(os.environ.get("EXPRESSWAY_KILLED_REQUESTS", "60"))
REQUESTS_PER_KILL = 6  # a request may lose two lanes and not three
STREAMS, LANES = 8, 4
PATIENT = FleetLimits(backoff_first_s=0.1, backoff_max_s=0.1, crashes_to_quarantine=1 << 30)


class Killer:
    """Kills a lane that has a request, after every few requests that have ended, while another one serves."""

    def __init__(self, roster: FleetRoster, dispatcher: Dispatcher) -> None:
        self._roster, self._dispatcher = roster, dispatcher
        self._chance = random.Random(3)
        self.kills = 0

    async def run(self, ended: Sequence[object]) -> None:
        while True:
            await asyncio.sleep(0.02)
            if len(ended) < REQUESTS_PER_KILL * (self.kills + 1):
                continue
            ready = [view for view in self._roster.lanes() if view.state == "ready"]
            busy = [view for view in ready if self._dispatcher.running(view.name)]
            if len(ready) < 2 or not busy:
                continue
            victim = self._chance.choice(busy)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
                self.kills += 1


async def outcome(generation: Generation, leave_after_s: float | None) -> str:
    """How it ended, and that what came was right."""
    if leave_after_s is not None:
        asyncio.get_running_loop().call_later(leave_after_s, generation.cancel)
    try:
        ids, end = await read_all(generation, limit_s=600)
    except Cancelled:
        return "cancelled"
    except CoordinatorError as error:
        return error.code
    assert ids == made_up(generation.request.prompt_ids, len(ids))
    if end.reason == lane_pb2.FINISH_REASON_CANCELLED:
        assert leave_after_s is not None
        return "cancelled"
    assert len(ids) == generation.request.max_tokens == end.usage.completion_tokens
    return "whole"


@pytest.mark.timeout(0 if REQUESTS > 100 else 300)
async def test_every_request_ends_once_and_whole_whatever_is_killed(folder: Path) -> None:
    names = [f"lane-{k}" for k in range(LANES)]
    processes = [fake_lane(folder, name, "--token-delay-s", "0.01") for name in names]
    async with supervised(folder, *processes), operated(folder, PATIENT) as (roster, dispatcher, _):
        await until(roster, lambda: states(roster) == dict.fromkeys(names, "ready"))
        chance, ended = random.Random(4), []
        numbers = iter(range(REQUESTS))

        async def stream() -> None:
            for number in numbers:
                asked = request((5 + number % 200, number % 251), chance.randint(5, 60), session=f"s{number % 11}")
                leaves = chance.uniform(0.0, 0.5) if chance.random() < 0.1 else None
                ended.append(await outcome(dispatcher.submit(asked), leaves))

        killer = Killer(roster, dispatcher)
        killing = asyncio.create_task(killer.run(ended))
        await asyncio.gather(*(stream() for _ in range(STREAMS)))
        killing.cancel()
        print(f"{collections.Counter(ended)}, {killer.kills} kills, restarts {[v.restarts for v in roster.lanes()]}")
        assert len(ended) == REQUESTS
        assert set(ended) <= {"whole", "cancelled"}
        assert killer.kills >= REQUESTS // REQUESTS_PER_KILL // 2
