"""The ring against a machine that copies as early as it may: what a step reads is what it needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.policy import Touched
from lanes.experts.ring import Ring
from tests.fakes.records import FakeRegion

EXPERTS = 20
ids = st.sets(st.integers(0, EXPERTS - 1))


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.integers(1, 7))
def test_every_expert_is_there_when_its_step_computes(layers, slots):
    ring, plan = Ring(slots), []
    for number, (needed, resident) in enumerate(layers):
        steps = ring.layer(sorted(needed), resident, EXPERTS)
        assert [step.first for step in steps] == [0, *(step.end for step in steps[:-1])]
        assert steps[-1].end == EXPERTS, "each expert in one step, ascending"
        assert [e for step in steps for e, _ in step.copies] == sorted(needed - resident)
        assert all(step.first <= e < step.end for step in steps for e, _ in step.copies)
        assert all(len(step.copies) <= max(1, slots // 2) for step in steps)
        plan += [(number, step) for step in steps]
    assert [step.number for _, step in plan] == list(range(len(plan)))
    # Copies run ahead as far as they may: each as soon as the steps it names are over.
    held, copied = {}, 0
    for done, (number, step) in enumerate(plan):
        while copied < len(plan) and plan[copied][1].after <= done:
            held |= {slot: (plan[copied][0], expert) for expert, slot in plan[copied][1].copies}
            copied += 1
        assert copied > done, "a step never waits for itself"
        assert all(held[slot] == (number, expert) for expert, slot in step.copies)


@pytest.mark.parametrize(("slots", "ahead"), [(1, 0), (2, 1), (8, 1)])
def test_one_step_fills_while_another_computes(slots, ahead):
    steps = Ring(slots).layer(range(EXPERTS), (), EXPERTS)
    assert all(step.after <= step.number - ahead for step in steps[1:])


def test_the_next_layers_first_copies_need_not_wait_for_this_ones_end():
    ring = Ring(4)
    last = ring.layer(range(6), (), EXPERTS)[-1]
    first = ring.layer(range(6), (), EXPERTS)[0]
    assert first.after <= last.number


@pytest.fixture
def cache():
    region = FakeRegion("q4g32", 32, 32, 2, 8)
    cache = ExpertCache(region, region.info, 6 * region.info.record_bytes, adaptive, Counters())
    for _ in range(4):
        cache.turn(Touched(np.arange(8), np.full(8, 1), 1))
    cache.turn(Touched(np.array([2, 3]), np.array([1, 1]), 1))
    assert cache.resident.sum() == 6
    return cache


def whole(cache):
    """Nothing is lost or owned twice."""
    slots = cache.slots()
    used = slots[slots >= 0].tolist()
    assert sorted([*used, *cache._free]) == list(range(6))
    assert (slots.reshape(cache.resident.shape) >= 0).tolist() == cache.resident.tolist()


def test_borrowed_slots_are_those_of_the_least_used_and_come_back(cache):
    before = cache.resident.copy()
    with cache.lend(4) as slots:
        assert len(set(slots)) == 4
        assert cache.resident.sum() == 2
        assert cache.resident[0, 2:4].all(), "what was used last and most stays"
        held = cache.slots()
        assert not set(slots) & set(held[held >= 0].tolist())
        cache.turn(Touched(np.arange(8), np.full(8, 1), 1))  # the policy does not hand them out meanwhile
        assert cache.resident.sum() == 2
    whole(cache)
    for _ in range(3):
        cache.turn(Touched(np.arange(8), np.full(8, 1), 1))
    assert cache.resident.sum() == before.sum(), "and are used again"
    whole(cache)


def test_they_come_back_whatever_ends_the_borrowing(cache):
    with pytest.raises(KeyboardInterrupt), cache.lend(6):
        raise KeyboardInterrupt
    whole(cache)
    assert len(cache._free) == 6


def test_no_more_than_there_are(cache):
    with cache.lend(100) as slots:
        assert len(slots) == 6
    whole(cache)
