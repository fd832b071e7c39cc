"""A short generation visits one whose long prompt is being read: who runs when, and what becomes of either."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.counters import Counters
from lanes.engine import Engine
from lanes.errors import Busy
from lanes.outbox import End, Outbox
from lanes.request import Request, Sampling
from lanes.turns import Turns
from tests.fakes.runner import FakeRunner, next_token

LONG, SHORT = tuple(range(40)), (7, 8, 9, 10, 11, 12)
ALONE = 1 << 31


class Rig:
    """An engine whose clock counts the runner's windows: a chunk takes as long as its rows."""

    def __init__(self, *, visitor_tokens=100):
        self.runner, self.counters, self.fatal = FakeRunner(), Counters(), threading.Event()
        self.engine = Engine(
            self.runner, self.counters, prefill_chunk_rows=4, visitor_tokens=visitor_tokens,
            on_fatal=self.fatal.set, clock=lambda: 1_000_000 * sum(rows for _, rows in self.runner.windows),
        )  # fmt: skip
        self.runner.gate = threading.Event()
        self.engine.start()

    def submit(self, request):
        outbox = Outbox(asyncio.get_running_loop(), 1024)
        self.engine.submit(request, outbox)
        return outbox

    async def begin_long(self, held=0, **more):
        """The long one, held in the window that begins at token `held`."""
        self.runner.gate_from = held
        outbox = self.submit(Request("long", LONG, 3, **more))
        for _ in range(held // 4 + 1):
            assert await asyncio.to_thread(self.runner.entered.acquire, timeout=60)
        return outbox

    async def hold(self, position, *, windows):
        """Lets go what is held; the window that begins at that position is held, after so many others (itself too)."""
        gate, self.runner.gate, self.runner.gate_from = self.runner.gate, threading.Event(), position
        gate.set()
        for _ in range(windows if position < 41 else 0):
            assert await asyncio.to_thread(self.runner.entered.acquire, timeout=60)

    @property
    def order(self):
        """Slots of the windows, without repeats."""
        owners = self.runner.owners
        return [slot for i, slot in enumerate(owners) if not i or owners[i - 1] != slot]


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.runner.gate.set()
    await asyncio.to_thread(rig.engine.stop)
    assert not rig.runner.open, "a state was left open"


def short(max_tokens=5, alone_ms=ALONE, interrupts="long", **more):
    return Request("short", SHORT, max_tokens, interrupts=interrupts, alone_ms=alone_ms, **more)


async def collect(outbox):
    events = []
    while not events or not isinstance(events[-1], End):
        events += await asyncio.wait_for(outbox.take(), 60)
    return [event.id for event in events[:-1]], events[-1]


def expected(prompt, count):
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids[-1], len(ids) - 1))
    return ids[len(prompt) :]


async def test_it_begins_at_the_end_of_the_chunk_and_the_long_one_goes_on_after_it(rig):
    long = await rig.begin_long(held=8)
    visitor = rig.submit(short())
    assert rig.engine.status().request_ids == ("long", "short")
    rig.runner.gate.set()
    ids, end = await collect(visitor)
    assert (ids, end.reason, end.waited_windows) == (expected(SHORT, 5), "length", 1)
    ids, end = await collect(long)
    assert (ids, end.reason, end.waited_windows) == (expected(LONG, 3), "length", 0)
    assert rig.runner.owners == [0] * 3 + [1] * (2 + 4) + [0] * (7 + 2)
    assert rig.engine.status().request_ids == ()


async def test_each_is_told_its_own_counters(rig):
    long = await rig.begin_long()
    visitor = rig.submit(short())
    rig.runner.gate.set()
    ends = [(await collect(box))[1].counters for box in (visitor, long)]
    assert [(c.requests, c.prompt_tokens, c.generated_tokens, c.windows) for c in ends] == [
        (1, len(SHORT), 5, 6),
        (1, len(LONG), 3, 12),
    ]
    assert rig.counters.prompt_tokens == len(SHORT) + len(LONG)


@pytest.mark.parametrize(
    "visitor",
    [
        short(interrupts=""),
        short(interrupts="other"),
        Request("big", SHORT, 95, interrupts="long"),  # 101 tokens; 100 may visit
    ],
)
async def test_who_may_not_visit_is_refused(rig, visitor):
    long = await rig.begin_long()
    with pytest.raises(Busy):
        rig.submit(visitor)
    rig.runner.gate.set()
    await collect(long)


async def test_one_of_just_the_size_may_and_a_second_visitor_may_not(rig):
    long = await rig.begin_long()
    visitor = rig.submit(Request("first", SHORT, 94, interrupts="long", alone_ms=ALONE))
    with pytest.raises(Busy):
        rig.submit(short())
    rig.runner.gate.set()
    assert (await collect(visitor))[1].completion_tokens == 94
    await collect(long)


async def test_nobody_visits_once_the_prompt_was_read(rig):
    rig.runner.gate_from = len(LONG)  # its first decode window
    long = rig.submit(Request("long", LONG, 3))
    for _ in range(11):
        assert await asyncio.to_thread(rig.runner.entered.acquire, timeout=60)
    with pytest.raises(Busy):
        rig.submit(short())
    rig.runner.gate.set()
    await collect(long)


async def test_a_visitor_of_the_last_chunk_runs_before_the_first_token(rig):
    long = await rig.begin_long(held=36)
    visitor = rig.submit(short())
    rig.runner.gate.set()
    await collect(visitor)
    await collect(long)
    assert rig.order == [0, 1, 0]


async def test_several_visit_one_after_the_other(rig):
    long = await rig.begin_long(held=20)
    for until in (28, 36, 44):
        visitor = rig.submit(short())
        await rig.hold(until, windows=6 + 2)
        assert (await collect(visitor))[0] == expected(SHORT, 5)
    rig.runner.gate.set()
    assert (await collect(long))[0] == expected(LONG, 3)
    assert rig.order == [0, 1, 0, 2, 0, 3, 0]


async def test_a_visit_that_turns_out_long_shares_the_lane_by_halves(rig):
    long = await rig.begin_long()
    visitor = rig.submit(short(max_tokens=60, alone_ms=10))
    rig.runner.gate.set()
    got = await asyncio.gather(collect(visitor), collect(long))
    assert [ids for ids, _ in got] == [expected(SHORT, 60), expected(LONG, 3)]
    # alone for 10 (6 of its prompt, then 4 tokens), one more by its turn, then four tokens for each chunk of four rows
    assert rig.runner.owners[:1] == [0]
    assert rig.runner.owners[1:8] == [1] * 7
    assert rig.runner.owners[8:18] == [0, 1, 1, 1, 1] * 2


async def test_a_visitor_is_the_active_one_when_the_other_has_ended(rig):
    long = await rig.begin_long(held=36)
    visitor = rig.submit(short(max_tokens=90, alone_ms=0))
    rig.runner.gate.set()
    await collect(long)
    assert rig.engine.status().request_ids in (("short",), ())
    assert (await collect(visitor))[0] == expected(SHORT, 90)


@pytest.mark.parametrize("cancelled", ["long", "short", "both"])
async def test_a_cancel_of_either_leaves_the_other_alone(rig, cancelled):
    long = await rig.begin_long(held=8)
    visitor = rig.submit(short(max_tokens=60))
    ids = ("long", "short") if cancelled == "both" else (cancelled,)
    assert all(rig.engine.cancel(request_id) for request_id in ids)
    rig.runner.gate.set()
    (short_ids, short_end), (long_ids, long_end) = await asyncio.gather(collect(visitor), collect(long))
    assert short_end.reason == ("cancelled" if "short" in ids else "length")
    assert long_end.reason == ("cancelled" if "long" in ids else "length")
    assert short_ids == ([] if "short" in ids else expected(SHORT, 60))
    assert long_ids == ([] if "long" in ids else expected(LONG, 3))
    assert (short_end.counters.cancelled, long_end.counters.cancelled) == ("short" in ids, "long" in ids)


async def test_who_is_put_aside_ends_at_the_visitors_next_safe_point(rig):
    long = await rig.begin_long()
    visitor = rig.submit(short(max_tokens=60))
    await rig.hold(20, windows=2 + 15)  # in the visitor's window at token 20
    rig.engine.cancel("long")
    rig.runner.gate.set()
    _, end = await collect(long)
    assert end.reason == "cancelled"
    assert (await collect(visitor))[0] == expected(SHORT, 60)
    assert rig.order == [0, 1]


async def test_a_fatal_error_of_a_visitor_ends_both(rig):
    rig.runner.poison_at = 8  # beyond the visitor's prompt; the long one is not there yet
    long = await rig.begin_long()
    visitor = rig.submit(short())
    rig.runner.gate.set()
    ends = [(await collect(box))[1] for box in (visitor, long)]
    assert [(end.reason, end.error_code) for end in ends] == [("error", "non_finite_logits")] * 2
    assert await asyncio.to_thread(rig.fatal.wait, 60)


async def test_a_stop_cancels_both(rig):
    long = await rig.begin_long()
    visitor = rig.submit(short())
    stopping = asyncio.create_task(asyncio.to_thread(rig.engine.stop))
    while rig.engine.status().state != "draining":
        await asyncio.sleep(0.001)
    rig.runner.gate.set()
    assert [(await collect(box))[1].reason for box in (visitor, long)] == ["cancelled"] * 2
    await stopping


async def test_sampling_is_what_it_would_be_alone(rig):
    hot = Sampling(temperature=3.0, seed=5)
    long = await rig.begin_long(held=8, sampling=hot)
    visitor = rig.submit(short(max_tokens=20, alone_ms=1, sampling=hot))
    rig.runner.gate.set()
    together = [ids for ids, _ in await asyncio.gather(collect(visitor), collect(long))]
    alone = [
        (await collect(rig.submit(Request("a", prompt, count, hot))))[0] for prompt, count in ((SHORT, 20), (LONG, 3))
    ]
    assert together == alone


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60))
def test_past_its_time_alone_a_visitor_is_never_ahead_by_more_than_a_step(alone, steps):
    turns, visitor_ns, host_ns = Turns(alone), 0, 0
    for visitors_step, hosts_step in steps:
        if turns.visitors():
            turns.took(visitors_step, visitor=True)
            visitor_ns += visitors_step
        else:
            turns.took(hosts_step, visitor=False)
            host_ns += hosts_step
        assert visitor_ns <= alone + host_ns + 9
        assert host_ns <= max(0, visitor_ns - alone) + 9
