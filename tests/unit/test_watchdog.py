"""Step times: the histogram is bounded and never says less than the truth; a step shows its progress and its end."""

import asyncio
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import watchdog
from lanes.counters import Counters
from lanes.engine import Engine
from lanes.outbox import Outbox
from lanes.request import Request, Sampling
from lanes.watchdog import BUCKETS, Durations, StepWatch, bucket, upper_ns
from tests.fakes.runner import FakeRunner


@settings(max_examples=300)
@given(st.integers(0, 1 << 50))
def test_a_duration_lies_below_the_upper_end_of_its_bucket_and_not_far(duration):
    number = bucket(duration)
    assert 0 <= number < BUCKETS
    if duration < 1 << watchdog.MOST_BITS + 1:
        assert duration < upper_ns(number)
    if 1 << watchdog.LEAST_BITS <= duration < 1 << watchdog.MOST_BITS + 1:
        assert upper_ns(number) <= 1.5 * duration + 1


def test_the_p99_is_that_of_the_slowest_hundredth():
    durations = Durations()
    assert durations.p99_ns() == 0
    for _ in range(99):
        durations.add(1_000_000)
    assert 1_000_000 <= durations.p99_ns() <= 1_500_000
    durations.add(1_000_000_000)
    assert durations.p99_ns() <= 1_500_000
    durations.add(1_000_000_000)
    assert 1_000_000_000 <= durations.p99_ns() <= 1_500_000_000


def test_old_steps_fade_and_memory_does_not_grow():
    durations = Durations()
    for _ in range(5000):
        durations.add(10_000_000_000)
    for _ in range(20 * watchdog.REMEMBERED):
        durations.add(1_000_000)
    assert durations.p99_ns() <= 1_500_000
    assert len(durations.counts) == BUCKETS
    assert sum(durations.counts) <= watchdog.REMEMBERED
    assert durations.added == 5000 + 20 * watchdog.REMEMBERED


def test_a_step_from_its_begin_to_its_end():
    watch = StepWatch()
    assert watch.step is None
    watch.progress()  # nothing runs: nothing to show
    assert watch.step is None
    watch.begin("prefill")
    began = watch.step
    assert (began.kind, began.progress_ns) == ("prefill", began.started_ns)
    watch.progress()
    assert watch.step.started_ns == began.started_ns
    assert watch.step.progress_ns >= began.progress_ns
    watch.done()
    assert watch.step.kind == "between"
    assert [(times.kind, times.count) for times in watch.times] == [("prefill", 1), ("decode", 0)]
    watch.idle()
    assert watch.step is None


async def test_an_engine_shows_the_step_that_it_is_stuck_in_and_every_layer_counts_as_progress():
    runner = FakeRunner()
    layers = threading.Semaphore(0)
    forward = runner.forward

    def layered(window, stopped, *meanwhile):
        while window.token_ids.shape[0] > 1 and layers.acquire(timeout=20) and not go.is_set():
            stopped()
        return forward(window, stopped, *meanwhile)

    go = threading.Event()
    runner.forward = layered
    engine = Engine(runner, Counters(), prefill_chunk_rows=8)
    engine.start()
    try:
        assert engine.status().step is None
        outbox = Outbox(asyncio.get_running_loop(), 16)
        engine.submit(Request("r", (1, 2, 3), 2, Sampling()), outbox)
        while (step := engine.status().step) is None or step.kind != "prefill":
            await asyncio.sleep(0.002)
        assert engine.status().step == step  # it stands still
        layers.release()
        while engine.status().step.progress_ns == step.progress_ns:
            await asyncio.sleep(0.002)
        assert engine.status().step.started_ns == step.started_ns
        go.set()
        layers.release()
        while engine.status().state != "ready":
            await asyncio.sleep(0.002)
        assert engine.status().step is None
        assert {times.kind: times.count for times in engine.status().step_times} == {"prefill": 1, "decode": 1}
    finally:
        go.set()
        layers.release(10)
        await asyncio.to_thread(engine.stop)
