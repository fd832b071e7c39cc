"""What a lane measures of itself at its start, on a model and a clock that are played; and on kernels, interpreted."""

import numpy as np
import pytest
import torch
import triton

from lanes import limits
from lanes.counters import Counters
from lanes.experts.gpu import pace as layer_pace
from lanes.experts.gpu.prompt import Means
from lanes.experts.gpu.reading import Reading
from lanes.experts.policy import Touched
from lanes.experts.slots import HostSlots
from lanes.kernels import grouped
from lanes.pace import Timed, pace_of, timed
from lanes.reading import Pace
from lanes.window import nothing
from tests.fakes.gpu_experts import Rig
from tests.fakes.records import FakeRegion
from tests.fakes.runner import VOCAB, FakeRunner

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize(("rows", "wanted"), [(4, 4), (5, 0)])
def test_medians_without_the_first_window(rows, wanted):
    counters, now = Counters(), [0]

    class Slow(FakeRunner):
        def forward(self, window, stopped, meanwhile=nothing):
            assert int(window.want_logits.sum()) == wanted
            took_ms = {0: 900, 1: 40, 2: 10, 3: 20}[len(self.windows)]
            now[0] += took_ms * 10**6
            counters.stream_wait_ns += took_ms * 10**5
            counters.expert_miss_bytes += took_ms
            return super().forward(window, stopped, meanwhile)

    runner = Slow()
    found = timed(runner, counters, VOCAB, rows, clock=lambda: now[0])
    assert found == Timed(rows, pytest.approx(0.020), pytest.approx(0.002), 20)
    assert found.busy_s == pytest.approx(0.018)
    assert [first for first, _ in runner.windows] == [0, rows, 2 * rows, 3 * rows]
    assert not runner.open, "the sequence is forgotten"


def test_a_pace_by_hand():
    found = pace_of(
        Timed(4, 0.030, 0, 40e6), Timed(5, 0.100, 0.040, 0), Timed(105, 0.300, 0.140, 0),
        link_bytes_per_s=5e10, miss_s=0.5e-3, expert_row_s=0.4e-3, record_bytes=10**6,
    )  # fmt: skip
    assert found.window_s == pytest.approx(0.010)  # 40 misses of half a millisecond
    assert found.pass_s == pytest.approx(0.060)
    assert found.dense_row_s == pytest.approx(0.6e-3)  # 100 ms for 100 more rows, experts off
    noisy = pace_of(
        Timed(4, 0.001, 0, 40e6), Timed(5, 0.1, 0, 0), Timed(5, 0.1, 0.2, 0),
        link_bytes_per_s=5e10, miss_s=0.5e-3, expert_row_s=0.4e-3, record_bytes=10**6,
    )  # fmt: skip
    assert (noisy.window_s, noisy.dense_row_s) == (0, 0)


@interpreted
def test_link_and_products_are_measured(monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_ROWS", 16)
    region = FakeRegion("q4g32", 32, 32, 2, 4)
    slots = HostSlots(layer_pace.SLOTS, region.info.record_bytes)
    records = np.array([region.record_address(layer, e) for layer in range(2) for e in range(4)], np.uint64)
    found = layer_pace.measure(slots, records, region.info, 2, torch.device("cpu"), rows=9)
    assert found.link_bytes_per_s > 1e6
    assert 0 < found.expert_row_s < 10


def reading(slots, pace):
    rig = Rig(slots=slots, hidden=32, inner=32, layers=2, experts=16, chosen=2)
    return rig, Reading(rig.cache, rig.region.info, 2, pace)


def test_a_lanes_own_numbers_make_the_choice():
    """A link of a record a second: two rows of a new cache choose few of 32 experts, many rows nearly all."""
    rig, rule = reading(0, Pace(1.0, 1e-9, 1e-9, 1.0, 0.0, 0.0))
    size = rig.region.info.record_bytes
    assert not rule.feeding(2).ahead, "without slots nothing comes ahead"
    assert rule.windows_up_to()[0] == 64, "windows cost nothing here"
    rig, rule = reading(32, Pace(float(size), 0.5, 9.0, 8.0, 0.0, 0.0))
    assert rule.feeding(8) == Means(ahead=True, slots=10)  # 4 of them come in 4 s of attention, for nothing
    up_to, choice = rule.windows_up_to()
    assert (up_to, choice.way) == (0, "chosen")  # a window takes longer than a pass
    assert choice.costs["windows"].link_bytes == 0, "in the long run such a cache holds everything"


def test_what_the_cache_holds_now_counts_for_a_pass():
    size = Rig(slots=0, hidden=32, inner=32, layers=2, experts=16, chosen=2).region.info.record_bytes
    rig, rule = reading(32, Pace(float(size), 0.5, 9.0, 0.1, 0.0, 0.0))
    assert not rule.feeding(2).ahead, "attention hides nothing, and most of what came would not be chosen"
    rig.cache.turn(Touched(np.arange(32), np.ones(32, np.int64), 1))
    assert rig.cache.resident.all()
    assert rule.feeding(limits.MAX_PREFILL_CHUNK_ROWS).slots == 10
