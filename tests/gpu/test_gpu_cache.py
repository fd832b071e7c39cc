"""The expert cache in VRAM: copies beside the windows, a table that changes between them, and never a bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lanes.experts.gpu import pace
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.policy import Plan
from tests.fakes.gpu_experts import Captured, Rig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = {"format": "q4g64", "hidden": 2560, "inner": 640, "layers": 4, "experts": 16, "chosen": 10}


@pytest.mark.parametrize("slots", [0, 6, 32, 64])
def test_captured_windows_at_every_cache_size(slots):
    rig = Rig("cuda", slots, **SIZES)
    for rows in (1, 4):
        with Captured(rig, rows) as window:
            for seed in range(20):
                window.check(seed % 7)
    assert (rig.counters.expert_hits > 0) == (slots > 0)


def test_prompts_and_formats():
    for format in ("q4g32", "q8"):
        rig = Rig("cuda", 20, format=format, hidden=256, inner=192, layers=3, experts=12, chosen=4)
        for seed, rows in enumerate((1, 2, 3, 4, 9, 33)):
            rig.window(seed, rows)
            rig.window(seed, rows, prompt=True)


def test_a_prompts_records_come_ahead_and_their_times_are_told():
    rig = Rig("cuda", 32, **SIZES)
    for seed in range(6):
        rig.window(seed, 200, prompt=True)
        torch.cuda.synchronize()  # a slot whose record is on its way is not lent, and here that could be all of them
    counters = rig.counters
    assert counters.streamed_bytes >= counters.expert_miss_bytes > 0
    assert counters.stream_wait_ns >= 0
    assert counters.streamed_bytes / (counters.streaming_ns / 1e9) < 1e12, "no link is that fast"
    x, ids, weights = (t.to("cuda") for t in rig.choices(np.random.default_rng(3), 200))
    told: list[tuple[int, float]] = []
    rig.experts.paced = lambda *pace: told.append(pace)
    rig.experts.begin_prompt(200)
    for layer in range(SIZES["layers"]):
        rig.experts.expect(layer, ids)
        rig.experts.forward(layer, x, ids, weights)
    rig.experts.end_window()
    rig.experts.settle()
    assert [rows for rows, _ in told] == [200]
    assert 0 < told[0][1] < 1, "between a layer's experts and the next one's routing"
    rig.experts.begin_prompt(200)
    rig.experts.forward(0, x, ids, weights)
    rig.experts.end_window()  # left with copies under way
    rig.window(9, 200, prompt=True)


@pytest.mark.parametrize("thinking", [False, True])
def test_everything_moves_between_every_two_windows(thinking):
    rng = np.random.default_rng(11)

    def wild(state, touched, budget):
        held = np.flatnonzero(state.resident)
        evict = rng.permutation(held)[: rng.integers(0, len(held) + 1)] if budget.swaps else held[:0]
        others = np.flatnonzero(~state.resident)
        admit = rng.permutation(others)[: min(budget.swaps, budget.slots - len(held) + len(evict))]
        resident = state.resident.copy()
        resident[evict], resident[admit] = False, True
        return replace(state, windows=state.windows + 1, resident=resident), Plan(evict, admit)

    rig = Rig("cuda", 20, wild, **SIZES)
    with Captured(rig, 2) as window:
        for seed in range(60):
            window.check(seed, thinking=thinking)
    rig.experts.settle()
    assert rig.counters.cache_evictions > 100
    assert rig.counters.expert_hits > 0


def test_nothing_is_allocated_by_a_window():
    rig = Rig("cuda", 32, **SIZES)
    with Captured(rig, 1) as window:
        for seed in range(3):
            window.check(seed)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rig.experts.begin_window(1)
        window.replay()
        torch.cuda.synchronize()
        rig.experts.end_window()
        rig.experts.settle()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_spare_slots_are_given_to_a_pass_and_come_back():
    torch.empty(200 << 20, dtype=torch.uint8, device="cuda")  # a segment that has room for all slots is left behind
    rig = Rig("cuda", 40, spare=30, **SIZES)
    with Captured(rig, 1) as window:
        for seed in range(12):
            window.check(seed)
        for turn in range(3):
            hits = rig.counters.expert_hits
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            rig.cache.give()
            assert rig.cache.room == 10
            assert torch.cuda.memory_reserved() <= before - 30 * rig.cache.record_bytes
            taken = torch.full((30 * rig.cache.record_bytes,), 0xEE, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_reserved() <= before, "what is given is had by who asks"
            rig.window(100 + turn, 70, prompt=True)
            del taken
            for seed in range(12):  # the first of them takes the slots back
                window.check(seed)
            assert rig.cache.room == 40
            assert rig.counters.expert_hits > hits
    rig.experts.settle()


def test_link_and_products_are_measured():
    rig = Rig("cuda", 0, **SIZES)
    info, device = rig.region.info, torch.device("cuda")
    slots = DeviceSlots(pace.SLOTS, info.record_bytes, device)
    found = pace.measure(slots, rig.cache.home, info, 10, device, rows=256)
    assert 0 < found.link_bytes_per_s < 1e12, "no link is that fast"
    assert found.expert_row_s > 0
