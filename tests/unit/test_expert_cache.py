"""The cache's table and the store's grouping, on the real native kernel: residency changes bytes read, never a bit."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.counters import Counters
from lanes.experts import reference
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import Cached, ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.policy import Plan, Touched
from lanes.experts.store import ExpertStore, Interrupted
from tests.fakes.records import FakeRegion

LAYERS, EXPERTS, HIDDEN, INNER = 3, 8, 64, 32
FORMATS = ("f32", "q4g32")


class Rig:
    def __init__(self, format="q4g32", slots=0, policy=adaptive, scratch_bytes=1 << 20):
        self.region = FakeRegion(format, HIDDEN, INNER, LAYERS, EXPERTS)
        self.counters = Counters()
        size = self.region.info.record_bytes
        self.cache = ExpertCache(self.region, self.region.info, slots * size, policy, self.counters)
        self.kernel = ExpertKernel(self.region.layout, threads=1)
        self.store = ExpertStore(self.kernel, self.cache, self.counters, scratch_bytes)

    def window(self, seed, rows=5, chosen=3, check=True):
        rng = np.random.default_rng(seed)
        x = torch.from_numpy(rng.normal(size=(rows, HIDDEN)).astype(np.float32))
        results = []
        for layer in range(LAYERS):
            ids, weights = routing(rng, rows, chosen)
            results.append(self.store.forward(layer, x, ids, weights))
        self.store.end_window()
        if check:
            self.check()
        return torch.stack(results)

    def check(self):
        """Every address holds the region's bytes; slots are distinct; gauges are true."""
        size = self.region.info.record_bytes
        slots = self.cache.slots().reshape(LAYERS, EXPERTS)
        taken = slots[slots >= 0]
        assert len(set(taken.tolist())) == len(taken)
        assert np.array_equal(slots >= 0, self.cache.resident)
        assert self.cache.by_layer() == Cached(tuple((slots >= 0).sum(1).tolist()), EXPERTS)
        assert self.counters.cache_used_bytes == len(taken) * size <= self.counters.cache_budget_bytes
        assert self.counters.cache_admissions - self.counters.cache_evictions == len(taken)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                address = int(self.cache.addresses[layer, expert])
                home = self.region.record_address(layer, expert)
                assert (address != home) == bool(self.cache.resident[layer, expert])
                assert ctypes.string_at(address, size) == self.region.record(layer, expert)


def routing(rng, rows, chosen):
    ids = np.stack([np.sort(rng.permutation(EXPERTS)[:chosen]) for _ in range(rows)])
    weights = rng.uniform(size=(rows, chosen)).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def truth(rig, layer, x, ids, weights):
    """Row by row, expert by expert, with the numpy definition."""
    out = []
    for r in range(x.shape[0]):
        records = [rig.region.record(layer, e) for e in ids[r].tolist()]
        y = np.stack([reference.expert(rig.region.layout, record, x[r].numpy()) for record in records])
        out.append(reference.combine(weights[r].numpy(), y))
    return np.stack(out)


@pytest.mark.parametrize("format", FORMATS)
def test_equal_to_the_written_arithmetic(format):
    rig = Rig(format, slots=4)
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(size=(6, HIDDEN)).astype(np.float32))
    for _ in range(3):
        ids, weights = routing(rng, 6, 3)
        found = rig.store.forward(1, x, ids, weights).numpy()
        assert np.array_equal(found, truth(rig, 1, x, ids, weights))
        rig.store.end_window()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("slots", [1, 5, LAYERS * EXPERTS, 1000])
def test_residency_changes_no_bit(format, slots):
    without, with_cache = Rig(format, 0), Rig(format, slots)
    for seed in range(6):
        assert torch.equal(without.window(seed), with_cache.window(seed))
    assert without.counters.expert_hits == without.counters.cache_admissions == 0
    assert with_cache.counters.cache_admissions > 0
    if slots >= LAYERS * EXPERTS:
        assert with_cache.counters.expert_hits > 0
        assert with_cache.counters.cache_evictions == 0


@pytest.mark.parametrize("rows", [1, 7])
def test_blocks_of_rows_change_no_bit(rows):
    whole, split = Rig(), Rig(scratch_bytes=3 * HIDDEN * 4 * 2)  # two rows of three pairs
    for seed in range(3):
        assert torch.equal(whole.window(seed, rows), split.window(seed, rows))
    assert split.store._scratch.nbytes <= 3 * HIDDEN * 4 * 2
    assert split.counters == whole.counters


def test_scratch_smaller_than_a_row_still_runs():
    assert torch.equal(Rig().window(1), Rig(scratch_bytes=1).window(1))


def test_counters_count_pairs_and_distinct_bytes():
    rig = Rig(slots=LAYERS * EXPERTS)
    size = rig.region.info.record_bytes
    x = torch.ones(4, HIDDEN)
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 7]])
    weights = torch.ones(4, 2)
    rig.store.forward(0, x, ids, weights)
    assert (rig.counters.expert_hits, rig.counters.expert_misses) == (0, 8)
    assert (rig.counters.expert_hit_bytes, rig.counters.expert_miss_bytes) == (0, 4 * size)
    rig.store.forward(1, x, ids, weights)  # same window: the table may not change yet
    assert rig.counters.expert_misses == 16
    rig.store.end_window()
    assert rig.counters.cache_used_bytes == 8 * size
    rig.store.forward(0, x, ids + 0, weights)
    assert (rig.counters.expert_hits, rig.counters.expert_hit_bytes) == (8, 4 * size)
    rig.store.end_window()
    assert rig.counters.cache_admissions == 8


def test_the_table_never_changes_inside_a_window():
    rig = Rig(slots=3)
    rig.window(1)
    before = rig.cache.addresses.copy()
    ids, weights = routing(np.random.default_rng(2), 5, 3)
    rig.store.forward(0, torch.ones(5, HIDDEN), ids, weights)
    assert np.array_equal(rig.cache.addresses, before)


def test_a_budget_below_one_record_keeps_nothing():
    region = FakeRegion("f32", HIDDEN, INNER, LAYERS, EXPERTS)
    counters = Counters()
    cache = ExpertCache(region, region.info, region.info.record_bytes - 1, adaptive, counters)
    cache.turn(Touched(np.array([1]), np.array([1]), 1))
    assert counters.cache_budget_bytes == counters.cache_admissions == 0
    cache = ExpertCache(region, region.info, region.info.record_bytes, adaptive, counters)
    cache.turn(Touched(np.array([1]), np.array([1]), 1))
    assert counters.cache_budget_bytes == counters.cache_used_bytes == region.info.record_bytes


def test_an_admitted_slot_is_read_and_not_the_region():
    rig = Rig(slots=LAYERS * EXPERTS)
    before = rig.window(4)
    rig.region._bytes[:] = 0  # every expert of this window is resident by now
    assert torch.equal(rig.window(4, check=False), before)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(0, 12), st.integers(1, 9))
def test_any_history_under_any_plan_keeps_table_and_bytes(seeds, slots, rows):
    rng = np.random.default_rng(sum(seeds))

    def wild(state, touched, budget):
        """Evicts and admits at random within the budget: the cache must not depend on the policy being sensible."""
        held, others = np.flatnonzero(state.resident), np.flatnonzero(~state.resident)
        evict = rng.permutation(held)[: rng.integers(0, len(held) + 1)]
        admit = rng.permutation(others)[: min(budget.slots - len(held) + len(evict), 3)]
        resident = state.resident.copy()
        resident[evict], resident[admit] = False, True
        return replace(state, windows=state.windows + 1, resident=resident), Plan(evict, admit)

    plain, rig = Rig(), Rig(slots=slots, policy=wild)
    for seed in seeds:
        assert torch.equal(plain.window(seed, rows), rig.window(seed, rows))


def test_an_admission_counts_as_paid_once_and_only_when_it_was_used():
    plans = [Plan(np.array([], np.int64), np.array(admit, np.int64)) for admit in ([1, 2], [], [], [])]
    plans[2] = Plan(np.array([2]), np.array([3]))

    def scripted(state, touched, budget):
        plan = plans[state.windows]
        return replace(state, windows=state.windows + 1), plan

    rig = Rig(slots=4, policy=scripted)
    paid = []
    for keys in ([1, 2, 3], [1, 7], [1, 3], [2, 3]):
        rig.cache.turn(Touched(np.array(keys), np.ones(len(keys), np.int64), 1))
        paid.append(rig.counters.cache_admitted_hits)
    # 1 is used after its admission, twice; 2 only before it and after its eviction; 3 after its admission.
    assert paid == [0, 1, 1, 2]
    assert (rig.counters.cache_admissions, rig.counters.cache_evictions) == (3, 1)


def test_a_recorder_is_told_of_every_window_that_routed_something():
    rig, seen = Rig(slots=2), []
    rig.store.recorder = seen.append
    rig.window(1, rows=5, chosen=3)
    rig.window(2, rows=1, chosen=3)
    rig.store.end_window()
    assert [window.window_rows for window in seen] == [5, 1]
    assert [int(window.rows.sum()) for window in seen] == [LAYERS * 15, LAYERS * 3]
    assert all((np.diff(window.keys) > 0).all() for window in seen)
    assert max(seen[0].rows) <= 5


def test_counters_since_and_restart():
    counters = Counters(windows=5, cache_used_bytes=7, cache_budget_bytes=9)
    before = counters.snapshot()
    counters.windows += 3
    counters.cache_used_bytes = 8
    assert counters.since(before) == Counters(windows=3, cache_used_bytes=8, cache_budget_bytes=9)
    counters.restart()
    assert counters == Counters(cache_used_bytes=8, cache_budget_bytes=9)


def test_a_long_window_can_be_left_between_blocks_of_rows():
    rig, asked = Rig(scratch_bytes=3 * 4 * HIDDEN), []  # a row at a time
    rig.store.stopped = lambda: asked.append(True) or len(asked) > 3
    rng = np.random.default_rng(1)
    ids, weights = routing(rng, 8, 3)
    with pytest.raises(Interrupted):
        rig.store.forward(0, torch.zeros(8, HIDDEN), ids, weights)
    assert len(asked) == 4


def test_a_cache_at_rest_learns_nothing_of_windows():
    rig = Rig(slots=4)
    rig.window(1)
    before, resident = rig.cache.state, rig.cache.resident.copy()
    with rig.cache.at_rest():
        rig.window(2)
    assert rig.cache.state is before
    assert np.array_equal(rig.cache.resident, resident)
    rig.window(2)
    assert rig.cache.state.windows == before.windows + 1
