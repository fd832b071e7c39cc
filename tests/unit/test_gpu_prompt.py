"""Windows of many rows on a GPU lane's experts, in Triton's interpreter: bits, the ring's copies, slots given back."""

import numpy as np
import pytest
import torch
import triton

from lanes.counters import Counters
from lanes.experts.policy import Touched
from lanes.experts.store import Interrupted
from lanes.kernels import grouped
from lanes.models.near import Near
from tests.fakes.gpu_experts import Rig

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_ROWS", 16)
    monkeypatch.setattr(grouped, "BLOCK_WEIGHTS", 32)
    monkeypatch.setattr(grouped, "ADD_COLUMNS", 32)


def small(slots):
    return Rig(slots=slots, hidden=32, inner=32, layers=2, experts=4, chosen=1)


@pytest.mark.parametrize(("slots", "ring"), [(0, 0), (8, 1), (24, 4)])
def test_every_bit_whatever_the_ring(slots, ring, monkeypatch):
    monkeypatch.setattr("lanes.experts.gpu.prompt.RING_SHARE", 8 if slots < 24 else 2)
    rig = small(slots)
    fetched, whole = [], rig.cache.fetch
    monkeypatch.setattr(rig.cache, "fetch", lambda copies: (fetched.extend(copies), whole(copies)))
    rig.window(1, 5)
    assert bool(fetched) == bool(ring)
    assert len({slot for _, slot in fetched}) <= ring
    assert rig.cache.room == min(slots, 8)
    assert sorted([*rig.cache._free, *(s for s in rig.cache.slots().tolist() if s >= 0)]) == list(range(min(slots, 8)))
    rig.window(2, 5, layers=1)  # after the cache has turned over


def test_what_routing_is_told_is_what_the_device_reads():
    rig = small(8)
    rig.window(1, 1, layers=1)
    counters = Counters()
    ids, _ = Near(rig.experts.resident, counters).route(0, torch.randn(9, 4), 1, True)
    assert rig.cache.resident[0].sum() == 1
    assert rig.cache.resident[0][ids.numpy()].all()
    assert counters.prompt_choices == 9


def test_a_cancelled_window_gives_its_slots_back():
    rig = small(8)
    x, ids, weights = rig.choices(np.random.default_rng(1), 6)
    rig.experts.forward(0, x, ids, weights)
    assert rig.cache.room < 8
    rig.experts.stopped = lambda: True
    with pytest.raises(Interrupted):
        rig.experts.forward(1, x, ids, weights)
    rig.experts.end_window()
    assert rig.cache.room == 8


def test_an_expert_that_lost_its_slot_to_the_ring_is_read_where_it_lies():
    rig = small(8)
    rig.cache.turn(Touched(np.arange(8), np.ones(8, np.int64), 1))
    assert rig.cache.resident.all()
    x, ids, weights = rig.choices(np.random.default_rng(9), 6)
    rig.experts.forward(0, x, ids, weights)
    (lost,) = np.argwhere(~rig.cache.resident)
    small_x, small_weights = x[:1], weights[:1]
    chosen = torch.tensor([[int(lost[1])]])
    got = rig.experts.forward(int(lost[0]), small_x, chosen, small_weights)
    assert torch.equal(got, rig.store.forward(int(lost[0]), small_x, chosen, small_weights))
    rig.experts.end_window()
