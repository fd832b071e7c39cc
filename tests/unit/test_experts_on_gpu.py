"""The GPU's experts in Triton's interpreter against the CPU's store: every bit, whatever is resident."""

import numpy as np
import pytest
import torch
import triton

from lanes.experts.store import Interrupted
from lanes.kernels import experts as kernels
from tests.fakes.gpu_experts import Captured, Rig

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("unwritten"),
]

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture
def small(monkeypatch):
    """A rig of one tile a matrix: the interpreter takes its time for each program, whatever its size."""
    monkeypatch.setattr(kernels, "GATE_TILE", (32, 4))

    def make(slots=0, **options):
        return Rig(slots=slots, **{"hidden": 32, "layers": LAYERS, "experts": EXPERTS, "chosen": CHOSEN, **options})

    return make


@pytest.mark.parametrize("slots", [0, 2, 8, 16])
def test_residency_changes_no_bit(small, slots):
    rig = small(slots)
    for seed in (1, 2, 1):
        rig.window(seed, 1)
    counters, plain = rig.counters, rig.host_counters
    assert (counters.cache_admissions > 0) == (slots > 0)
    assert counters.expert_hits + counters.expert_misses == plain.expert_misses == LAYERS * CHOSEN * 3
    assert counters.expert_hit_bytes + counters.expert_miss_bytes == plain.expert_miss_bytes
    assert (counters.expert_hits >= LAYERS * CHOSEN) == (slots >= 8)  # the last window repeats the first


def test_windows_of_every_size_and_a_prompt(small):
    rig, seen = small(16), []
    rig.experts.recorder = seen.append
    for seed, rows in enumerate((4, 3, 5)):
        rig.window(seed, rows)
    assert [window.window_rows for window in seen] == [4, 3, 5]
    assert [int(window.rows.sum()) for window in seen] == [LAYERS * CHOSEN * rows for rows in (4, 3, 5)]
    assert all((np.diff(window.keys) > 0).all() for window in seen)


def test_a_decode_window_as_a_lane_runs_it(small):
    rig = small(16)
    with Captured(rig, 2) as window:
        window.check(1)
        window.check(1)
    assert rig.counters.expert_hits == rig.counters.expert_misses == LAYERS * CHOSEN * 2


def test_counting_and_planning_beside_the_next_window_change_no_bit_and_no_count(small):
    def run(thinking):
        rig, seen, counted = small(5), [], []
        rig.experts.recorder = seen.append
        with Captured(rig, 2) as window:
            for seed in (1, 1, 2, 1, 2, 1):
                window.check(seed, thinking=thinking)
                counted.append(rig.counters.snapshot())
        rig.experts.settle()
        return rig, seen, counted

    (at_once, told, _), (beside, told_beside, counted) = run(False), run(True)
    assert [list(window.keys) for window in told] == [list(window.keys) for window in told_beside]
    pairs = LAYERS * CHOSEN * 2
    assert [c.expert_hits + c.expert_misses for c in counted] == [pairs * n for n in range(6)]
    for rig in (at_once, beside):
        counters = rig.counters
        assert counters.expert_hits + counters.expert_misses == pairs * 6
        assert counters.expert_hit_bytes + counters.expert_miss_bytes == rig.host_counters.expert_miss_bytes
        assert counters.cache_admissions > 0
    assert 0 < beside.counters.expert_hits <= at_once.counters.expert_hits
    assert beside.cache.state.windows == at_once.cache.state.windows


def test_a_slot_is_read_and_not_the_region(small):
    rig = small(16)
    rig.window(4, 1)
    rig.experts.forward(0, *choose([[0, 7]]))
    before = rig.experts.forward(1, *choose([[0, 7]]))
    rig.experts.end_window()
    rig.region._bytes[:] = 0  # by now both are resident
    assert torch.equal(rig.experts.forward(1, *choose([[0, 7]])), before)


def test_rows_that_were_wrong_are_counted_but_not_kept(small):
    rig, seen = small(16), []
    rig.experts.recorder = seen.append
    rig.experts.forward(1, *choose([[0, 1], [1, 2], [5, 6]]))
    rig.experts.keep(1)
    rig.experts.end_window()
    (window,) = seen
    assert (window.keys.tolist(), window.rows.tolist(), window.window_rows) == ([8, 9], [1, 1], 1)
    assert (rig.counters.expert_misses, rig.counters.expert_miss_bytes) == (6, 5 * rig.region.info.record_bytes)
    assert rig.cache.resident[1].nonzero()[0].tolist() == [0, 1]


def test_a_draft_layer_counts_once_a_window_for_the_cache(small):
    rig, seen = small(16), []
    rig.experts.recorder = seen.append
    for ids in ([[0, 1]], [[1, 2]], [[1, 3]], [[6, 7]], [[6, 7]]):  # the last two are too many
        rig.experts.forward(LAYERS - 1, *choose(ids))
    rig.experts.end_window()
    assert seen[0].keys.tolist() == [8, 9, 10, 11]
    assert seen[0].rows.tolist() == [1, 1, 1, 1]
    assert rig.counters.expert_misses == 6


def test_a_draft_before_a_window_belongs_to_it(small):
    rig, seen = small(16), []
    rig.experts.recorder = seen.append
    rig.experts.forward(1, *choose([[0, 1]]))
    rig.experts.begin_window(2)
    x, ids, weights = choose([[2, 3], [2, 4]])
    rig.experts.launch(0, x, ids.to(torch.int32), weights, torch.empty_like(x))
    rig.experts.forward(1, *choose([[5, 6]]))
    rig.experts.keep(1)
    rig.experts.end_window()
    assert not seen, "it is told beside the next window"
    rig.experts.settle()
    assert (seen[0].keys.tolist(), seen[0].window_rows) == ([2, 3, 8, 9, 13, 14], 1)
    assert rig.counters.expert_misses == 8


def test_it_can_be_left_before_a_layer(small):
    rig = small()
    rig.experts.stopped = lambda: True
    with pytest.raises(Interrupted):
        rig.experts.forward(0, *choose([[0, 1]]))


def choose(ids):
    """(x, ids, weights)."""
    chosen = torch.tensor(ids)
    return torch.linspace(-1, 1, 32 * len(ids)).reshape(-1, 32), chosen, torch.full(chosen.shape, 0.5)


def test_few_rows_that_ran_eagerly_are_waited_for_at_their_end(small, monkeypatch):
    rig, waited = small(16), []
    rig.experts.forward(0, *choose([[0, 1]]))

    class Stream:
        def synchronize(self):
            waited.append(rig.cache.version)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    before, rig.experts.device = rig.cache.version, torch.device("cuda")
    rig.experts.end_window()
    assert waited == [before], "before the table changes and the log is read"
