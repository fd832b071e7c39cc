"""The CPU's share of the GPU's misses, with the GPU's side in Triton's interpreter and the thread as it is."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton

from bench.frozen import Frozen
from lanes.errors import HandshakeLost, StartError
from lanes.experts.gpu import probe, rates
from lanes.experts.gpu.doorbell import KernelWords
from lanes.experts.gpu.start import start_share
from lanes.experts.native import ExpertKernel
from lanes.experts.split import cpu_share_table
from lanes.kernels import experts as kernels
from tests.fakes.gpu_experts import Rig

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(kernels, "GATE_TILE", (32, 4))
    made = []

    def make(slots=0, counts=None, **options):
        rig = Rig(slots=slots, hidden=32, layers=LAYERS, experts=EXPERTS, chosen=CHOSEN)
        made.append(rig.share(counts, **options))
        return rig

    yield make
    for share in made:
        share.close()


@pytest.mark.parametrize("kept", ["nothing", "half", "all"])
def test_who_computes_changes_no_bit(rig, kept):
    """Of the misses the link has none, a half, all."""
    most = np.arange(4 * CHOSEN + 1, dtype=np.int32)
    counts = {"nothing": most, "half": most // 2, "all": most * 0}[kept]
    r = rig(slots=6, counts=counts)
    for seed, rows in enumerate((1, 4, 2)):
        r.shared_window(seed, rows)
    counters = r.counters
    assert counters.expert_hits > 0
    assert counters.expert_misses > 0
    on_cpu = counters.expert_cpu_bytes / counters.expert_miss_bytes
    assert on_cpu == {"nothing": 1, "all": 0}.get(kept, on_cpu)
    assert 0.2 < on_cpu < 0.8 or kept != "half"


def test_a_table_that_moves_on_beside_a_window_changes_no_bit_of_it(rig):
    """The thread has its own copy of what was resident, the counts are those of the window's table."""
    r, plain = rig(slots=6), rig(slots=6)
    moved = []
    for seed in (1, 1, 1, 2, 1, 2, 2, 3):
        before = r.cache.version
        r.shared_window(seed, 1, thinking=True)
        moved.append(r.cache.version != before)
        plain.shared_window(seed, 1)
    r.experts.settle()
    assert any(moved)
    ours, theirs = r.counters, plain.counters
    assert 0 < ours.expert_hits <= theirs.expert_hits
    assert ours.expert_hits + ours.expert_misses == theirs.expert_hits + theirs.expert_misses
    assert ours.expert_cpu_bytes == ours.expert_miss_bytes, "the CPU took every miss of the table that the window read"


def test_another_tenant_finds_nothing_of_what_went_to_the_cpu(rig):
    """Neither in the block that both sides see nor in the kernel's scratch, and the next window is as ever."""
    r = rig(counts=np.arange(4 * CHOSEN + 1, dtype=np.int32))
    r.shared_window(1, 2)
    share, work = r.experts.share, r.experts._work[1]
    block = (share.inputs.head, share.inputs.ids, share.inputs.x, share.y)
    left = (*block, work.jobs.expert, work.jobs.pairs, work.slots, work.x.q)
    assert all(tensor.any() for tensor in left)
    r.experts.erase()
    assert not any(tensor.any() for tensor in left)
    assert share._kernel.erase() == 0
    r.shared_window(2, 2)


def test_a_prompt_between_two_windows_does_without(rig):
    r = rig()
    r.shared_window(1, 1)
    r.window(2, 1)
    r.shared_window(3, 1)


def test_the_split_changes_between_windows(rig):
    r = rig(counts=cpu_share_table(4 * CHOSEN, 50.0, 1000.0, 0.0))
    assert not r.experts.share.counts[1:].all()
    r.shared_window(1, 1)
    r.experts.share.split(np.arange(4 * CHOSEN + 1, dtype=np.int32))
    r.shared_window(1, 1)
    with pytest.raises(AssertionError):
        r.experts.share.split(np.arange(4 * CHOSEN + 1, dtype=np.int32) + 1)


def test_a_start_finds_a_doorbell_and_a_split(rig, monkeypatch):
    monkeypatch.setattr(probe, "REPLAYS", 1)
    r, refused = rig(), []
    r.experts.share.close()
    kernel = ExpertKernel(r.region.layout, threads=2)
    measure = partial(rates.measure, layers=1)
    monkeypatch.setattr(rates, "WARM_UP", 1)
    monkeypatch.setattr(rates, "measure", measure)
    started = start_share(
        r.experts, r.cache, kernel, r.region.record_address(0, 0), lambda name, why: refused.append((name, why))
    )
    assert not refused
    assert started.share.doorbell.name == "kernel"
    assert min(started.rates.link_us, started.rates.link_alone_us) > 0
    assert started.share.counts.tolist() == sorted(started.share.counts.tolist())
    told = []
    started.share.on_split = lambda found: told.append((found.bias, found.counts))
    monkeypatch.setattr("lanes.experts.gpu.share.after", lambda climb, rows, ns: replace(climb, bias=-2.0))
    r.shared_window(1, 1)
    assert told[0][0] == -2.0
    assert r.counters.expert_misses == LAYERS * CHOSEN  # the probe's windows are not counted
    started.share.close()


def test_the_split_follows_what_the_threads_layers_took(rig, monkeypatch):
    """Believed to be slow, the CPU is found to be fast, and gets more once it was seen."""
    monkeypatch.setattr("lanes.experts.gpu.share._LOOK", 2)
    monkeypatch.setattr("lanes.experts.cpu_line.LEAST", 2.0)
    r, told = rig(), []
    share = r.experts.share
    share.on_split = lambda found: told.append((found.line, found.counts))
    share.search(rates.Rates(link_us=1e6, cpu_us=1e6, cpu_start_us=0.0, link_alone_us=1e6, cpu_alone_us=1e6))
    before = share.counts
    assert 0 < before[CHOSEN] < CHOSEN
    for seed in range(2):
        r.shared_window(seed, 1)
    ((line, counts),) = told
    assert 0 < line.us(1) < 1e6
    assert (counts == share.counts).all()
    assert counts[CHOSEN] == CHOSEN
    share.split(before)
    for seed in range(2):
        r.shared_window(seed, 1)
    assert len(told) == 1, "a split that was given stays"


def test_the_split_is_searched_for_beside_the_next_window(rig, monkeypatch):
    """So that between two windows nothing is worked out; the window after that one has it."""
    monkeypatch.setattr("lanes.experts.gpu.share._LOOK", 2)
    monkeypatch.setattr("lanes.experts.cpu_line.LEAST", 2.0)
    r, told = rig(), []
    share = r.experts.share
    share.on_split = told.append
    share.search(rates.Rates(link_us=1e6, cpu_us=1e6, cpu_start_us=0.0, link_alone_us=1e6, cpu_alone_us=1e6))
    for seed in range(3):
        assert not told
        r.shared_window(seed, 1, thinking=True)
    assert len(told) == 1


def test_a_window_tells_what_its_layers_took_and_whose_their_misses_were(rig, monkeypatch):
    counts = np.arange(4 * CHOSEN + 1, dtype=np.int32) // 2
    r, told = rig(slots=6, counts=counts), []
    monkeypatch.setattr(r.experts.share, "learn", lambda *given: told.append(given))
    for seed, rows in enumerate((1, 4, 2)):
        resident = r.cache.resident.copy()
        r.shared_window(seed, rows)
        seen_rows, lapse, sides = told.pop()
        times = lapse.layers_ns
        assert lapse.window_ns > 0
        assert seen_rows == rows
        assert times.shape == (LAYERS, 2)
        assert (np.diff(times.reshape(-1)) >= 0).all()
        rng, misses = np.random.default_rng(seed), []
        for layer in range(LAYERS):
            _, ids, _ = r.choices(rng, rows)
            misses.append(len({int(e) for e in ids.reshape(-1) if not resident[layer, int(e)]}))
        assert sides.sum(axis=1).tolist() == misses
        assert sides[:, 0].tolist() == [int(counts[each]) for each in misses]
    assert r.counters.expert_hits > 0
    r.window(5, 1)  # which the CPU has no share of
    assert not told


def test_the_split_follows_what_the_link_is_seen_to_take(rig, monkeypatch):
    """Believed to be slow, the link is asked for more once it is believed to be fast."""
    monkeypatch.setattr("lanes.experts.gpu.share._LOOK", 2)
    monkeypatch.setattr("lanes.experts.link_cost.judged", lambda known, windows: replace(known, link_us=1e-3))
    monkeypatch.setattr("lanes.experts.cpu_line.LEAST", 1e9)  # nothing is learnt of the CPU
    r, told = rig(), []
    share = r.experts.share
    share.on_split = told.append
    share.search(rates.Rates(link_us=1e6, cpu_us=1e3, cpu_start_us=0.0, link_alone_us=1e6, cpu_alone_us=1e6))
    assert share.counts[CHOSEN] == CHOSEN
    for seed in range(2):
        r.shared_window(seed, 1)
    assert told[-1].link_us == 1e-3
    assert share.counts[CHOSEN] == 0


def test_an_expert_is_not_believed_to_cost_the_cpu_nothing(rig, monkeypatch):
    """Where nothing is learnt of it: no less than half of what it took alone, or than the link takes."""
    monkeypatch.setattr("lanes.experts.gpu.share._LOOK", 2)
    monkeypatch.setattr("lanes.experts.cpu_line.LEAST", 1e9)
    monkeypatch.setattr("lanes.experts.cpu_line.HOPE", 0.01)
    r, told = rig(), []
    share = r.experts.share
    share.on_split = told.append
    start = rates.Rates(link_us=50.0, cpu_us=1e3, cpu_start_us=30.0, link_alone_us=50.0, cpu_alone_us=20.0)
    for alone_us, least_us in ((20.0, 10.0), (1e3, 50.0)):
        share.search(replace(start, cpu_alone_us=alone_us))
        for seed in range(2):
            r.shared_window(seed, 1)
        assert told[-1].line.each_us == least_us
        assert told[-1].line.start_us < 1e-9
        assert share.counts[2] > 0, "a layer of two misses tries it"


def test_doorbells_that_do_wrong_are_refused(rig, monkeypatch):
    class Deaf(KernelWords):
        name = "deaf"

        def ring(self, number):
            pass

    r, refused = rig(), []
    monkeypatch.setattr(probe, "KernelWords", Deaf)

    def make():
        r.experts.share.close()
        return r.share(silence_s=0.5)

    with pytest.raises(StartError, match="no doorbell"):
        probe.attach(r.experts, make, lambda name, why: refused.append((name, why)))
    assert refused == [("deaf", "the CPU's share of experts has ended: no doorbell in time")]


def test_launches_outside_a_window_do_not_hang(rig):
    r = rig()
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    r.experts.launch(0, torch.zeros(1, 32), ids, torch.ones(1, 2), torch.empty(1, 32))
    r.experts.end_window()
    r.shared_window(1, 1)


def test_a_stopped_thread_is_an_error_and_not_a_hang(rig):
    r = rig(silence_s=1.0)
    frozen = Frozen()
    with pytest.raises(HandshakeLost, match="does not get on"):
        r.shared_window(2, 1)
    with pytest.raises(HandshakeLost):
        r.experts.begin_window(1)
    frozen.thaw()


def test_a_thread_that_ended_is_an_error(rig):
    r = rig()
    r.experts.begin_window(1)
    r.experts.share.close()
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    r.experts.launch(0, torch.zeros(1, 32), ids, torch.ones(1, 2), torch.empty(1, 32))
    with pytest.raises(HandshakeLost, match="stopped"):
        r.experts.end_window()


def test_a_window_of_too_few_layers_is_an_error(rig, monkeypatch):
    monkeypatch.setattr("lanes.experts.gpu.share._SETTLE_S", 0.1)
    r = rig()
    r.experts.begin_window(1)
    with pytest.raises(HandshakeLost, match="before the CPU's share"):
        r.experts.end_window()
