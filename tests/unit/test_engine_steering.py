"""Which windows may be routed to resident experts: a prompt's, never an answer's, and none where that is off."""

import asyncio

import pytest

from lanes.counters import Counters
from lanes.engine import Engine
from lanes.outbox import End, Outbox
from lanes.request import Request
from tests.fakes.runner import FakeRunner


async def ran(request, **options):
    """(first position, rows, steered) of every window, and the end."""
    runner = FakeRunner()
    engine = Engine(runner, Counters(), prefill_chunk_rows=4, **options)
    engine.start()
    outbox = Outbox(asyncio.get_running_loop(), 100)
    engine.submit(request, outbox)
    events = []
    while not events or not isinstance(events[-1], End):
        events += await asyncio.wait_for(outbox.take(), 60)
    await asyncio.to_thread(engine.stop)
    return [(*window, steered) for window, steered in zip(runner.windows, runner.steered, strict=True)], events[-1]


async def test_a_prompt_is_and_its_answer_is_not():
    windows, _ = await ran(Request("r", tuple(range(10)), 3), steered=True)
    assert windows == [(0, 4, True), (4, 4, True), (8, 2, True), (10, 1, False), (11, 1, False)]


@pytest.mark.parametrize("replayed", [1, 3, 5])
async def test_output_of_a_lost_lane_is_read_as_it_was_written(replayed):
    windows, _ = await ran(Request("r", tuple(range(10)), 8, replayed_tokens=replayed), steered=True)
    asked = 10 - replayed
    assert all(first + rows <= asked for first, rows, steered in windows if steered)
    assert sum(rows for _, rows, steered in windows if steered) == asked
    assert sum(rows for first, rows, steered in windows if not steered and first < 10) == replayed


async def test_off_means_that_nothing_is_told_to_the_model_and_windows_are_as_ever():
    windows, _ = await ran(Request("r", tuple(range(10)), 8, replayed_tokens=3))
    assert windows[:3] == [(0, 4, False), (4, 4, False), (8, 2, False)]
    assert not any(steered for *_, steered in windows)
