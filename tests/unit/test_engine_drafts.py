"""Drafts in the engine: whatever is drafted, the answer, its end, its log-probabilities and the state are the same."""

import asyncio
import threading

import pytest

from lanes import limits
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.engine import Engine
from lanes.outbox import End, Outbox
from lanes.request import Request, Sampling
from tests.fakes.drafts import convinced, oracle, scripted
from tests.fakes.runner import FakeRunner

PROMPT = (1, 2, 3, 4, 5)
SAMPLINGS = {
    "greedy": Sampling(),
    "penalties": Sampling(repetition_penalty=30.0, presence_penalty=2.0, frequency_penalty=1.0),
    "bias": Sampling(logit_bias=((7, 4.5), (9, 5.5)), frequency_penalty=0.4),
    "hot": Sampling(temperature=2.0, seed=4, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=2.0),
    "hot, least length": Sampling(temperature=3.0, seed=5, presence_penalty=-2.0, min_tokens=11),
    "hot, no cut": Sampling(temperature=3.0, seed=6, frequency_penalty=0.7),
}


class Rig:
    """An engine on the fake model, with a drafter."""

    def __init__(self, drafter=None, runner=None):
        self.runner, self.drafter = runner or FakeRunner(), drafter
        self.fatal = threading.Event()
        self.engine = Engine(self.runner, Counters(), prefill_chunk_rows=4, drafter=drafter, on_fatal=self.fatal.set)
        self.engine.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.runner.gate:
            self.runner.gate.set()
        self.engine.stop()
        assert not self.runner.open, "a state slot was left open"

    async def run(self, request, limit=1024):
        outbox = Outbox(asyncio.get_running_loop(), limit)
        self.engine.submit(request, outbox)
        return await collect(outbox)


async def collect(outbox):
    events = []
    while not events or not isinstance(events[-1], End):
        events += await asyncio.wait_for(outbox.take(), 60)
    return events[:-1], events[-1]


def ask(max_tokens=20, prompt=PROMPT, **more):
    return Request("r1", tuple(prompt), max_tokens, **more)


async def plain(request):
    with Rig() as rig:
        tokens, end = await rig.run(request)
        return tokens, end, rig.runner.next


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({6, 42, 13})], ids=["", "stops"])
async def test_no_draft_changes_an_answer(sampling, stop_ids):
    request = ask(sampling=sampling, stop_ids=stop_ids, logprobs=True, top_logprobs=2)
    tokens, end, length = await plain(request)
    ids = [t.id for t in tokens]
    for drafts in (1, 2, 3):
        for every in (1, 2, 3, 4, 5, 100):  # all wrong, every other one wrong, ..., all right
            drafter = scripted(oracle(PROMPT, ids, drafts, lambda place: place % every == 0))  # noqa: B023
            with Rig(drafter) as rig:
                again, end_again = await rig.run(request)
            assert [t.id for t in again] == ids
            assert [t.logprobs for t in again] == [t.logprobs for t in tokens]
            assert (end_again.reason, end_again.completion_tokens) == (end.reason, end.completion_tokens)
            assert rig.runner.next == length, "the state holds what it would without drafts"
            counted = end_again.counters
            assert counted.decode_windows + counted.right_draft_tokens == len(ids) - 1
            if every == 100 and len(ids) > 4:
                assert max(right for _, right, _ in drafter.rounds) == drafts


async def test_every_rejection_at_every_place():
    ids = [t.id for t in (await plain(ask(30)))[0]]
    for wrong in range(5, 35):
        with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: place == wrong))) as rig:  # noqa: B023
            tokens, end = await rig.run(ask(30))
        assert [t.id for t in tokens] == ids
        assert (3, 1 + (wrong - 6) % 4) in [(rows - 1, kept) for rows, kept in rig.runner.kept] or wrong in (5, 34, 33)
        assert end.counters.draft_tokens >= end.counters.right_draft_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 9])
async def test_no_row_is_past_the_last_token(max_tokens):
    """The runner refuses rows that the state was not opened for."""
    ids = [t.id for t in (await plain(ask(20)))[0]]
    drafter = scripted(oracle(PROMPT, ids, 3, lambda place: False))
    with Rig(drafter) as rig:
        tokens, end = await rig.run(ask(max_tokens))
    assert ([t.id for t in tokens], end.reason) == (ids[:max_tokens], "length")
    assert rig.runner.next == rig.runner.capacity == 5 + max_tokens - 1


@pytest.mark.parametrize("place", range(8))
async def test_a_stop_id_inside_a_window_is_the_last_token(place):
    ids = [t.id for t in (await plain(ask(20)))[0]]
    stop = ids[place]
    expected = ids[: ids.index(stop) + 1]
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False))) as rig:
        tokens, end = await rig.run(ask(20, stop_ids=frozenset({stop})))
    assert ([t.id for t in tokens], end.reason) == (expected, "stop")
    assert rig.runner.next == 5 + len(expected) - 1, "the stop id itself is never read back"


async def test_a_drafted_stop_id_that_must_wait_is_refused():
    ids = [t.id for t in (await plain(ask(8)))[0]]
    request = ask(8, stop_ids=frozenset({ids[2]}), sampling=Sampling(min_tokens=5))
    expected, end, _ = await plain(request)
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False))) as rig:
        tokens, again = await rig.run(request)
    assert [t.id for t in tokens] == [t.id for t in expected]
    assert tokens[2].id != ids[2]
    assert again.reason == end.reason


@pytest.mark.parametrize("cut", [1, 4, 7, 11])
async def test_a_replay_is_the_rest_of_the_answer_however_windows_fall(cut):
    sampling = Sampling(temperature=2.5, seed=9, frequency_penalty=0.3)
    ids = [t.id for t in (await plain(ask(20, sampling=sampling)))[0]]
    request = ask(20, (*PROMPT, *ids[:cut]), sampling=sampling, replayed_tokens=cut)
    for every in (2, 3, 100):
        with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: place % every == 0))) as rig:  # noqa: B023
            tokens, end = await rig.run(request)
        assert [t.id for t in tokens] == ids[cut:]
        assert end.completion_tokens == 20


async def test_a_cancel_in_a_trial_window_leaves_nothing():
    ids = [t.id for t in (await plain(ask(40)))[0]]
    runner = FakeRunner()
    runner.gate, runner.gate_from = threading.Event(), 10
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False)), runner) as rig:
        outbox = Outbox(asyncio.get_running_loop(), 1024)
        rig.engine.submit(ask(40), outbox)
        for _ in range(5):  # two chunks of the prompt, rows at 5 and at 9, and the held one at 13
            assert await asyncio.to_thread(runner.entered.acquire, timeout=60)
        rig.engine.cancel("r1")
        runner.gate.set()
        tokens, end = await collect(outbox)
        assert (end.reason, [t.id for t in tokens]) == ("cancelled", ids[:9])
        assert runner.next == 13
        assert runner.turns == 5, "the safe point came all the same"
        runner.gate = None
        again, _ = await rig.run(ask(40))
        assert [t.id for t in again] == ids


async def test_a_cancel_between_two_tokens_of_a_window():
    ids = [t.id for t in (await plain(ask(12)))[0]]
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False))) as rig:
        outbox = Outbox(asyncio.get_running_loop(), 3)  # room for three tokens: the fourth one waits
        generation = rig.engine.submit(ask(12), outbox)
        while rig.engine.status().counters.generated_tokens < 3:
            await asyncio.sleep(0.001)
        generation.cancel()
        tokens, end = await collect(outbox)
        assert end.reason == "cancelled"
        assert [t.id for t in tokens] == ids[: len(tokens)]
        assert 3 <= len(tokens) <= 4


async def test_a_reader_that_stops_in_the_middle_of_a_window(monkeypatch):
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.0)
    ids = [t.id for t in (await plain(ask(20)))[0]]
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False))) as rig:
        outbox = Outbox(asyncio.get_running_loop(), 2)
        rig.engine.submit(ask(20), outbox)
        while rig.engine.status().state == "busy":
            await asyncio.sleep(0.001)
        tokens, end = await collect(outbox)
        assert (end.error_code, [t.id for t in tokens]) == ("slow_reader", ids[:2])
        assert not rig.fatal.is_set()


async def test_nan_in_a_drafted_row_ends_the_process_like_any():
    ids = [t.id for t in (await plain(ask(20)))[0]]
    runner = FakeRunner()
    runner.poison_at = 11
    with Rig(scripted(oracle(PROMPT, ids, 3, lambda place: False)), runner) as rig:
        tokens, end = await rig.run(ask(20))
        assert end.error_code == "non_finite_logits"
        assert [t.id for t in tokens] == ids[: len(tokens)]
        assert await asyncio.to_thread(rig.fatal.wait, 60)


async def test_counters_by_place():
    ids = [t.id for t in (await plain(ask(14)))[0]]
    drafter = scripted(oracle(PROMPT, ids, 3, lambda place: place in (8, 10)))
    with Rig(drafter) as rig:
        _, end = await rig.run(ask(14))
    # prompt gives token 5; windows: [5 | 6 7 x], [8 | 9 x .], [10 | 11 12 13], [14 | 15 16 17], and [18] needs none
    assert drafter.rounds == [(3, 2, 3), (3, 1, 2), (3, 3, 3), (3, 3, 3)][: len(drafter.rounds)]
    counted = end.counters
    assert counted.decode_windows == len(drafter.rounds)
    assert counted.drafts_right_at_1 == sum(right > 0 for _, right, _ in drafter.rounds)
    assert counted.drafts_right_at_3 == sum(right > 2 for _, right, _ in drafter.rounds)
    assert counted.drafts_at_3 == sum(drafts > 2 for drafts, _, _ in drafter.rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("lies", [lambda place: False, lambda place: place % 3 == 0, lambda place: True])
async def test_the_draft_layer_through_the_engine(sampling, lies):
    request = ask(20, sampling=sampling)
    ids = [t.id for t in (await plain(request))[0]]
    runner = FakeRunner()
    runner.lies = lies
    with Rig(Drafter(3, runner.guess, beliefs=convinced()), runner) as rig:
        tokens, end = await rig.run(request)
    assert [t.id for t in tokens] == ids
    assert runner.guessed
    if sampling == Sampling() and not lies(0):
        assert end.counters.drafts_right_at_3 >= 4
        assert end.counters.decode_windows <= 6


async def test_off_means_off():
    runner = FakeRunner()
    with Rig(Drafter(0, runner.guess, beliefs=convinced()), runner) as rig:
        await rig.run(ask(20))
    assert (runner.guessed, runner.kept) == ([], [])
