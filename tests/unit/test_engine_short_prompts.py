"""Short parts of a prompt are read by decode windows where the lane found that cheaper; the answer is the same."""

import asyncio

import pytest

from lanes.engine import Engine
from tests.unit.test_engine import Case, expected, request


@pytest.mark.parametrize(("tokens", "windows"), [
    (1, [(0, 1)]), (4, [(0, 4)]), (7, [(0, 4), (4, 3)]), (8, [(0, 4), (4, 4)]), (9, [(0, 9)]),
    (16, [(0, 16)]), (24, [(0, 16), (16, 4), (20, 4)]), (25, [(0, 16), (16, 9)]),
])  # fmt: skip
async def test_parts_at_the_limit_and_past_it(tokens, windows):
    case = Case(chunk=16, windows_up_to=8)
    prompt = tuple(range(2, 2 + tokens))
    try:
        sent, end = await case.run(request(prompt, 3))
    finally:
        await asyncio.to_thread(case.engine.stop)
    assert [token.id for token in sent] == expected(prompt, 3)
    assert case.runner.windows[: len(windows)] == windows
    assert case.runner.turns == len(case.runner.windows), "a safe point after each"
    assert end.counters.prompt_tokens == tokens
    assert end.counters.window_tokens == sum(rows for _, rows in windows if rows <= 4)
    assert not case.runner.open


async def test_a_cancel_between_two_of_them():
    case = Case(chunk=16, windows_up_to=16)
    outbox, generation = case.submit(request(tuple(range(2, 14))))
    forward = case.runner.forward

    def cancelling(window, stopped, meanwhile):
        if case.runner.windows:
            generation.cancel()
        return forward(window, stopped, meanwhile)

    case.runner.forward = cancelling
    events = []
    while not events:
        events += await asyncio.wait_for(outbox.take(), 60)
    await asyncio.to_thread(case.engine.stop)
    assert events[-1].reason == "cancelled"
    assert case.runner.windows[0] == (0, 4)
    assert not case.runner.open


async def test_what_is_steered_is_read_in_passes():
    case = Case(chunk=16, windows_up_to=16)
    case.engine.stop()
    case.engine = Engine(case.runner, case.counters, prefill_chunk_rows=16, windows_up_to=16, steered=True)
    case.engine.start()
    await case.run(request(tuple(range(2, 12)), 1))
    await asyncio.to_thread(case.engine.stop)
    assert case.runner.windows == [(0, 10)]
    assert case.runner.steered == [True]
