import asyncio
import threading
from dataclasses import replace

import pytest

from coordinator.text.tokenizer import Tokenizer
from lanes import limits
from lanes.counters import Counters
from lanes.engine import Engine
from lanes.errors import Busy, Draining
from lanes.grammar import Grammars
from lanes.outbox import End, Outbox
from lanes.request import Request, Sampling
from tests.fakes.doors import thinking_dir
from tests.fakes.runner import VOCAB, FakeRunner, next_token


class Case:
    """An engine on a fake model, and helpers to run requests through it."""

    def __init__(self, chunk=4, windows_up_to=0):
        self.runner = FakeRunner()
        self.counters = Counters()
        self.changes = 0
        self.fatal = threading.Event()
        self.engine = Engine(
            self.runner, self.counters, prefill_chunk_rows=chunk, windows_up_to=windows_up_to,
            on_change=self._change, on_fatal=self.fatal.set,
        )  # fmt: skip
        self.engine.start()

    def _change(self):
        self.changes += 1

    def submit(self, request, limit=1024):
        outbox = Outbox(asyncio.get_running_loop(), limit)
        return outbox, self.engine.submit(request, outbox)

    async def run(self, request):
        outbox, _ = self.submit(request)
        return await collect(outbox)

    async def entered(self):
        assert await asyncio.to_thread(self.runner.entered.acquire, timeout=20)


async def collect(outbox):
    events = []
    while not events or not isinstance(events[-1], End):
        events += await asyncio.wait_for(outbox.take(), 20)
    assert sum(isinstance(e, End) for e in events) == 1
    return events[:-1], events[-1]


@pytest.fixture
async def case():
    case = Case()
    yield case
    if case.runner.gate:
        case.runner.gate.set()
    await asyncio.to_thread(case.engine.stop)
    assert not case.runner.open, "a state slot was left open"


def request(prompt=(1, 2, 3, 4, 5), max_tokens=6, **more):
    return Request("r1", tuple(prompt), max_tokens, **more)


def expected(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids[-1], len(ids) - 1))
    return ids[len(prompt) :]


async def test_greedy_answer_windows_and_counters(case):
    tokens, end = await case.run(request())
    assert [t.id for t in tokens] == expected((1, 2, 3, 4, 5), 6)
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 5, 6)
    assert case.runner.windows == [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (9, 1)]
    assert case.runner.turns == 7  # a safe point after every window
    assert (end.counters.windows, end.counters.prompt_tokens, end.counters.generated_tokens) == (7, 5, 6)
    assert end.counters.prefill_ns > 0
    assert end.counters.decode_ns > 0
    stamps = [t.stamp_ns for t in tokens]
    assert stamps == sorted(stamps)


async def test_each_chunk_is_hinted_before_the_one_ahead_of_it_runs(case):
    await case.run(request(prompt=range(10), max_tokens=2))
    assert case.runner.hints == [(0, 4), (4, 8), (8, 10)]
    assert case.runner.hinted_before == [0, 0, 1], "windows that had run by then"


async def test_what_is_known_is_not_read_and_usage_says_so(case):
    case.runner.known = 3
    tokens, end = await case.run(request())
    assert [t.id for t in tokens] == expected((1, 2, 3, 4, 5), 6)
    assert case.runner.windows[0] == (3, 2)
    assert (end.prompt_tokens, end.cached_tokens, end.restored_tokens) == (5, 3, 1)
    assert end.counters.prompt_tokens == 2
    case.runner.known = 100
    _, end = await case.run(request((1, 2, 3, 4, 5), 6, replayed_tokens=4))
    assert (end.prompt_tokens, end.cached_tokens) == (1, 1), "replayed tokens are no prompt"


async def test_windows_end_where_the_state_is_kept(case):
    await case.run(request(prompt=range(11), checkpoint_positions=(2, 6, 11)))
    assert case.runner.marks == [2, 6, 11]
    assert case.runner.windows[:4] == [(0, 2), (2, 4), (6, 4), (10, 1)]


@pytest.mark.parametrize(("chunk", "windows"), [
    (20, [(0, 20), (20, 17)]), (10, [(0, 10), (10, 10), (20, 10), (30, 7)]),
    (4, [(0, 4), (4, 4), (8, 2), (10, 4)]),
])  # fmt: skip
async def test_no_regular_mark_cuts_a_chunk_in_two(monkeypatch, chunk, windows):
    """Marks every 10 tokens, or every chunk, where that is longer."""
    monkeypatch.setattr(limits, "CHECKPOINT_EVERY_TOKENS", 10)
    case = Case(chunk)
    try:
        await case.run(request(tuple(range(2, 39)), 1))
    finally:
        await asyncio.to_thread(case.engine.stop)
    assert case.runner.windows[: len(windows)] == windows


@pytest.mark.parametrize(("chunk", "windows"), [
    (20, [(0, 3), (3, 13), (16, 20), (36, 1)]), (4, [(0, 3), (3, 3), (6, 4), (10, 2), (12, 4)]),
])  # fmt: skip
async def test_hints_cut_few_chunks(monkeypatch, chunk, windows):
    """Of those less than half a chunk apart the later one counts, and the first is kept."""
    monkeypatch.setattr(limits, "CHECKPOINT_GAP_TOKENS", 2)
    case = Case(chunk)
    try:
        await case.run(replace(request(tuple(range(2, 39)), 1), checkpoint_positions=(3, 6, 12, 16)))
    finally:
        await asyncio.to_thread(case.engine.stop)
    assert case.runner.windows[: len(windows)] == windows


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
async def test_every_chunk_size_gives_the_same_answer(chunk):
    case = Case(chunk)
    tokens, _ = await case.run(request())
    assert [t.id for t in tokens] == expected((1, 2, 3, 4, 5), 6)
    case.engine.stop()


async def test_the_stop_id_is_the_last_token_sent(case):
    answer = expected((1, 2, 3, 4, 5), 6)
    tokens, end = await case.run(request(stop_ids=frozenset({answer[2]})))
    first = answer.index(answer[2])
    assert [t.id for t in tokens] == answer[: first + 1]
    assert end.reason == "stop"


async def test_a_stop_id_in_the_prompt_stops_nothing(case):
    tokens, end = await case.run(request(prompt=(49,) * 3, max_tokens=1, stop_ids=frozenset({49})))
    assert len(tokens) == 1
    assert end.reason == ("stop" if tokens[0].id == 49 else "length")


async def test_a_stop_id_on_the_last_allowed_token_is_stop(case):
    answer = expected((1, 2, 3, 4, 5), 1)
    _, end = await case.run(request(max_tokens=1, stop_ids=frozenset(answer)))
    assert end.reason == "stop"


async def test_sampling_reproduces_and_the_seed_matters(case):
    hot = [request(max_tokens=30, sampling=Sampling(temperature=3.0, seed=s)) for s in (5, 5, 6)]
    ids = [[t.id for t in (await case.run(r))[0]] for r in hot]
    assert ids[0] == ids[1] != ids[2]


async def test_a_continued_prompt_draws_the_same_numbers(case):
    """Replay: prompt + emitted tokens as a prompt goes on with the same tokens."""
    sampling = Sampling(temperature=3.0, seed=11)
    whole = [t.id for t in (await case.run(request(max_tokens=20, sampling=sampling)))[0]]
    rest, _ = await case.run(request((1, 2, 3, 4, 5, *whole[:8]), 12, sampling=sampling))
    assert [t.id for t in rest] == whole[8:]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=30.0),
        Sampling(presence_penalty=2.0, frequency_penalty=2.0),
        Sampling(logit_bias=((7, 4.5), (9, 5.5)), frequency_penalty=0.4),
        Sampling(temperature=2.0, seed=4, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=2.0),
        Sampling(temperature=3.0, seed=5, presence_penalty=-2.0, frequency_penalty=1.5, min_tokens=15),
        Sampling(temperature=3.0, seed=6, min_p=0.1, logit_bias=((3, -20.0), (4, 3.0)), min_tokens=6),
    ],
)
@pytest.mark.parametrize("cut", [1, 5, 7])
async def test_a_replay_is_the_rest_of_the_answer(case, sampling, cut):
    stop_ids = frozenset({6, 42})
    whole, end = await case.run(request(max_tokens=20, sampling=sampling, stop_ids=stop_ids))
    ids = [t.id for t in whole]
    assert len(ids) > cut
    again, end_again = await case.run(
        request((1, 2, 3, 4, 5, *ids[:cut]), 20, sampling=sampling, stop_ids=stop_ids, replayed_tokens=cut)
    )
    assert [t.id for t in again] == ids[cut:]
    assert (end_again.reason, end_again.prompt_tokens) == (end.reason, 5)
    assert end_again.completion_tokens == end.completion_tokens == len(ids)
    assert end_again.counters.generated_tokens == len(ids) - cut  # what this lane did


async def test_a_stop_id_waits_for_min_tokens(case):
    answer = expected((1, 2, 3, 4, 5), 6)
    tokens, end = await case.run(request(stop_ids=frozenset(answer), sampling=Sampling(min_tokens=4), max_tokens=9))
    assert not {t.id for t in tokens[:4]} & set(answer)
    assert len(tokens) > 4 or end.reason == "length"


async def test_log_probabilities_are_of_the_model_whatever_is_drawn(case):
    plain, _ = await case.run(request(max_tokens=1, logprobs=True, top_logprobs=2))
    other = Sampling(logit_bias=((plain[0].id, -100.0),), repetition_penalty=3.0)
    biased, _ = await case.run(request(max_tokens=1, logprobs=True, top_logprobs=2, sampling=other))
    assert biased[0].id != plain[0].id
    assert biased[0].logprobs.top == plain[0].logprobs.top


async def test_logprobs_only_on_request(case):
    plain, _ = await case.run(request())
    assert plain[0].logprobs is None
    tokens, _ = await case.run(request(logprobs=True, top_logprobs=3))
    assert tokens[0].logprobs.top[0] == (tokens[0].id, tokens[0].logprobs.chosen)
    assert len(tokens[0].logprobs.top) == 3


async def test_cancel_in_prefill_stops_at_the_next_chunk(case):
    case.runner.gate = threading.Event()
    outbox, _ = case.submit(request(prompt=[1] * 40))
    await case.entered()
    assert case.engine.cancel("r1")
    assert case.engine.cancel("r1")  # idempotent
    case.runner.gate.set()
    tokens, end = await collect(outbox)
    assert (tokens, end.reason, end.completion_tokens) == ([], "cancelled", 0)
    assert not case.runner.windows  # the held one was left half way
    assert end.counters.cancelled == 1


async def test_cancel_in_decode_stops_within_one_step(case):
    case.runner.gate, case.runner.gate_from = threading.Event(), 3
    outbox, _ = case.submit(request(prompt=[1], max_tokens=40))
    for _ in range(4):  # the prompt and the steps at positions 1, 2 and 3; the last one is held
        await case.entered()
    case.engine.cancel("r1")
    case.runner.gate.set()
    tokens, end = await collect(outbox)
    assert end.reason == "cancelled"
    assert len(tokens) == end.completion_tokens == 3
    assert case.runner.windows == [(0, 1), (1, 1), (2, 1)]  # the held one was left half way


async def test_cancel_of_another_id_or_of_nothing(case):
    assert not case.engine.cancel("r1")
    case.runner.gate = threading.Event()
    outbox, _ = case.submit(request())
    assert not case.engine.cancel("r2")
    case.runner.gate.set()
    assert (await collect(outbox))[1].reason == "length"
    assert not case.engine.cancel("r1")


async def test_one_generation_at_a_time(case):
    case.runner.gate = threading.Event()
    outbox, _ = case.submit(request())
    with pytest.raises(Busy):
        case.submit(request())
    assert case.engine.status().state == "busy"
    assert case.engine.status().request_ids == ("r1",)
    case.runner.gate.set()
    await collect(outbox)
    case.runner.gate = None
    assert (await case.run(request()))[1].reason == "length"


async def test_free_before_the_end_is_handed_over(case):
    """A client that sends its next request the moment it reads Finished is never told that the lane is busy."""
    for _ in range(200):
        _, end = await case.run(request(max_tokens=1))
        assert end.reason == "length"


async def test_drain_finishes_what_runs_and_takes_nothing_new(case):
    case.runner.gate = threading.Event()
    outbox, _ = case.submit(request())
    case.engine.drain()
    with pytest.raises(Draining):
        case.submit(request())
    case.runner.gate.set()
    assert (await collect(outbox))[1].reason == "length"
    assert case.engine.status().state == "draining"
    with pytest.raises(Draining):
        case.submit(request())


async def test_stop_cancels_what_runs(case):
    case.runner.gate = threading.Event()
    outbox, _ = case.submit(request())
    await case.entered()
    stopping = asyncio.create_task(asyncio.to_thread(case.engine.stop))
    while case.engine.status().state != "draining":
        await asyncio.sleep(0)
    case.runner.gate.set()
    assert (await collect(outbox))[1].reason == "cancelled"
    await stopping


@pytest.mark.parametrize("position", [4, 6])  # the prompt's last row, a decode step
async def test_nan_ends_the_request_and_the_engine(case, position):
    case.runner.poison_at = position
    tokens, end = await case.run(request())
    assert (end.reason, end.error_code) == ("error", "non_finite_logits")
    assert end.completion_tokens == len(tokens) == position - 4
    assert await asyncio.to_thread(case.fatal.wait, 10)
    with pytest.raises(Draining):
        case.submit(request())


async def test_a_bug_ends_the_request_without_its_message(case, capsys):
    case.runner.raise_at = 5
    _, end = await case.run(request())
    assert (end.reason, end.error_code, end.counters.failed) == ("error", "engine_failed", 1)
    assert "secret" not in end.error_message
    assert await asyncio.to_thread(case.fatal.wait, 10)
    assert "secret" not in str(capsys.readouterr())


async def test_a_bug_while_nothing_runs_ends_the_engine(case, capsys):
    case.runner.idle_fails = True
    assert await asyncio.to_thread(case.fatal.wait, 60)
    with pytest.raises(Draining):
        case.submit(request())
    assert "secret" not in str(capsys.readouterr())


async def test_a_client_that_stops_reading_loses_its_generation(case, monkeypatch):
    monkeypatch.setattr(limits, "SLOW_READER_S", 0.0)
    outbox, _ = case.submit(request(max_tokens=30), limit=3)
    while case.engine.status().state == "busy":
        await asyncio.sleep(0.001)
    tokens, end = await collect(outbox)
    assert len(tokens) == 3  # what the box held
    assert (end.reason, end.error_code) == ("error", "slow_reader")
    assert not case.fatal.is_set()
    assert (await case.run(request()))[1].reason == "length"  # the lane goes on


async def test_state_is_opened_for_exactly_what_can_be_read_back(case):
    await case.run(request(max_tokens=6))
    assert case.runner.capacity == 5 + 6 - 1
    assert case.runner.next == 10


async def test_the_fake_model_is_in_range():
    assert all(0 <= next_token(t, p) < VOCAB for t in range(VOCAB) for p in range(5))


async def test_a_grammar_binds_the_answer_and_a_bad_one_ends_only_its_request(case):
    case.engine._steps._grammars = Grammars(thinking_dir() / "tokenizer.json", VOCAB, (2,))
    bound = request(max_tokens=60, grammar='start: "AB" | "BA"', stop_ids=frozenset({2}))
    tokens, end = await case.run(bound)
    assert end.reason == "stop"
    tokenizer = Tokenizer.load(thinking_dir())
    assert b"".join(tokenizer.token_bytes(t.id) for t in tokens) in (b"AB", b"BA")
    _, end = await case.run(request(grammar="start: ("))
    assert (end.reason, end.error_code) == ("error", "bad_grammar")
    tokens, end = await case.run(request())
    assert [t.id for t in tokens] == expected((1, 2, 3, 4, 5), 6)
    assert not case.fatal.is_set()
