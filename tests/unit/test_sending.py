"""Drawn tokens are told beside the window that they start: none late, none lost, none twice, in their order."""

import asyncio
import threading

import pytest

from lanes import limits
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.generation import Generation
from lanes.outbox import Outbox
from lanes.steps import Steps
from lanes.watchdog import StepWatch
from tests.fakes.drafts import convinced
from tests.fakes.runner import FakeRunner
from tests.unit.test_engine import Case, expected, request

PROMPT = (3, 5)


async def collected(outbox):
    events = []
    while not events or hasattr(events[-1], "id"):
        events += await asyncio.wait_for(outbox.take(), 60)
    return [token.id for token in events[:-1]], events[-1]


@pytest.fixture
async def case():
    made = Case()
    yield made
    await asyncio.to_thread(made.engine.stop)


async def test_a_token_is_told_while_the_window_that_it_starts_runs(case):
    case.runner.gate, case.runner.gate_from = threading.Event(), len(PROMPT) + 1
    outbox, generation = case.submit(request(PROMPT, 5))
    told = []
    while len(told) < 2:  # of the prompt, and of the first window; the second one is held
        told += [token.id for token in await asyncio.wait_for(outbox.take(), 60)]
    assert told == expected(PROMPT, 5)[:2]
    assert generation.sent == 2
    case.runner.gate.set()
    rest, end = await collected(outbox)
    assert told + rest == expected(PROMPT, 5)
    assert (end.reason, end.completion_tokens, end.counters.generated_tokens) == ("length", 5, 5)


async def test_what_was_drawn_is_told_though_its_window_never_begins(case):
    case.runner.interrupted_early = True
    outbox, generation = case.submit(request(PROMPT, 9))
    forward = case.runner.forward

    def cancelling(window, stopped, meanwhile):
        if len(case.runner.windows) == 3:  # the prompt, two tokens
            generation.cancel()
        return forward(window, stopped, meanwhile)

    case.runner.forward = cancelling
    told, end = await collected(outbox)
    assert (end.reason, told) == ("cancelled", expected(PROMPT, 9)[:3])
    assert (end.completion_tokens, end.counters.generated_tokens) == (3, 3)


async def test_what_was_drawn_is_told_though_its_window_fails(case):
    case.runner.interrupted_early, case.runner.raise_at = True, len(PROMPT) + 1
    outbox, _ = case.submit(request(PROMPT, 9))
    told, end = await collected(outbox)
    assert (end.reason, told) == ("error", expected(PROMPT, 9)[:2])
    assert end.completion_tokens == 2


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_a_reader_that_sleeps_gets_what_there_is_room_for(case, monkeypatch, room):
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.0)
    outbox = Outbox(asyncio.get_running_loop(), room)
    case.engine.submit(request(PROMPT, 9), outbox)
    while case.engine.status().state == "busy":
        await asyncio.sleep(0.001)
    told, end = await collected(outbox)
    assert (end.error_code, told) == ("slow_reader", expected(PROMPT, 9)[:room])
    assert end.completion_tokens == room
    assert len(case.runner.windows) == 1 + room, "no window for a token that nobody took"


def steps_of(runner, counters, drafter):
    return Steps(
        runner, counters, StepWatch(), prefill_chunk_rows=4, windows_up_to=0, steered=False, drafter=drafter,
        grammars=None, publish=lambda: None,
    )  # fmt: skip


@pytest.mark.parametrize(("alone", "most", "waiting"), [(True, 0, 1), (False, 0, 0), (True, 2, 1)])
async def test_nothing_waits_through_anothers_step(alone, most, waiting):
    counters, runner = Counters(), FakeRunner()
    steps = steps_of(runner, counters, Drafter(most))
    generation = Generation(request(PROMPT, 5), Outbox(asyncio.get_running_loop(), 64))
    running, drawn = steps.of(generation), 0
    next(running)  # the prompt
    steps.alone = alone
    for _ in range(3):
        next(running)
        drawn += 1
        assert generation.sent == counters.generated_tokens == drawn - waiting
    running.close()
    assert generation.sent == drawn, "what was drawn is told"
    assert not runner.open


async def test_nothing_waits_while_the_draft_layer_is_asked():
    counters, runner, told = Counters(), FakeRunner(), []

    def guess(slot, token, number, best, meanwhile):
        before = counters.generated_tokens  # nobody was told anything on the way to the draft layer
        found = runner.guess(slot, token, number, best, meanwhile)
        told.append((before, counters.generated_tokens))
        return found

    steps = steps_of(runner, counters, Drafter(1, guess, beliefs=convinced()))
    generation = Generation(request(PROMPT, 9), Outbox(asyncio.get_running_loop(), 64))
    running = steps.of(generation)
    for _ in running:
        pass
    assert told[:2] == [(0, 1), (1, 3)], "a token, then one with its draft, each while the layer guesses"
    assert generation.sent == 9
    assert not runner.open
