"""Slots whose memory a long pass has for a while: the most used experts stay, and every address holds its record."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts.adaptive import adaptive
from lanes.experts.policy import Touched
from tests.fakes.cache_plans import scripted
from tests.fakes.spare_slots import with_spare
from tests.unit.test_expert_cache import EXPERTS, LAYERS, Rig

KEYS = LAYERS * EXPERTS


def made(slots, spare, policy=adaptive):
    rig = Rig(slots=slots, policy=policy)
    return rig, rig.cache, with_spare(rig.cache, spare)


def uses(cache, keys, times=1):
    for _ in range(times):
        cache.turn(Touched(np.array(keys), np.ones(len(keys), np.int64), 1))


def resident(cache):
    return np.flatnonzero(cache.resident).tolist()


def test_the_least_used_go_and_the_others_move():
    rig, cache, _ = made(4, 2)
    uses(cache, [0, 1])
    uses(cache, [2, 3], 6)  # 0 and 1 have the first slots, which stay
    assert resident(cache) == [0, 1, 2, 3]
    assert {slot for slot in cache.slots().tolist() if slot >= 2} == set(cache.slots()[[2, 3]].tolist())
    version = cache.version
    cache.give()
    assert resident(cache) == [2, 3]
    assert cache.version != version
    assert cache.room == 2
    rig.check()
    uses(cache, [5], 9)
    assert cache.resident.sum() == 2, "nobody is given a slot that is away"
    rig.check()
    cache.take()
    assert cache.room == 4
    uses(cache, [5, 6, 7], 4)
    assert cache.resident.sum() == 4, "they are used again"
    rig.check()


def test_it_is_given_once_and_taken_once():
    _, cache, slots = made(4, 2)
    cache.take()
    assert cache.room == 4, "nothing was given"
    cache.give()
    cache.give()
    assert (slots.given, cache.room) == (1, 2)
    cache.take()
    cache.take()
    assert cache.room == 4


def test_what_does_not_come_back_is_asked_for_after_the_next_pass():
    rig, cache, slots = made(6, 4)
    slots.back = 1
    cache.give()
    cache.take()
    assert cache.room == 3
    slots.back = 4
    cache.take()
    assert cache.room == 3, "asking again between windows would cost each of them the allocator's time"
    uses(cache, range(6), 3)
    assert cache.resident.sum() == 3
    cache.give()
    assert cache.room == 2
    cache.take()
    assert cache.room == 6
    uses(cache, range(6), 3)
    assert cache.resident.sum() == 6
    rig.check()


def test_a_move_is_no_admission():
    rig, cache, _ = made(4, 2, scripted(([], [0, 1, 2, 3]), *[([], [])] * 9))
    uses(cache, [0])
    cache.turn(Touched(np.array([2]), np.array([1]), 1))
    before = (rig.counters.cache_admissions, rig.counters.cache_admitted_hits)
    cache.give()
    assert 2 in resident(cache), "used last"
    cache.turn(Touched(np.array([2]), np.array([1]), 1))
    assert (rig.counters.cache_admissions, rig.counters.cache_admitted_hits) == before
    rig.check()


@pytest.mark.parametrize("spare", [0, 4])
def test_none_or_all_are_spare(spare):
    rig, cache, _ = made(4, spare)
    uses(cache, range(4), 2)
    cache.give()
    assert cache.resident.sum() == 4 - spare
    rig.check()
    cache.take()
    uses(cache, range(4), 2)
    assert cache.resident.sum() == 4
    rig.check()


steps = st.lists(
    st.one_of(
        st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=6).map(sorted),
        st.sampled_from(["give", "take", "think", "pause"]), st.integers(1, 5),
    ),
    max_size=24,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_any_order_of_passes_and_windows(steps, slots, spare, back):
    """Slots are lent while others are away, windows think late, not all memory comes back."""
    spare = min(spare, slots)
    rig, cache, memory = made(slots, spare)
    memory.back = back
    for step in steps:
        if step == "give":
            cache.give()
        elif step == "take":
            cache.take()
        elif step == "think":
            cache.think()
        elif step == "pause":
            cache.pause(lambda: Touched(np.array([1, 4]), np.array([1, 1]), 1))
        elif isinstance(step, int):
            with cache.lend(step) as lent:
                assert len(lent) == min(step, cache.room + len(lent))
                assert all(memory.address(slot) == cache.address(slot) for slot in lent)
                cache.think()
        else:
            uses(cache, step)
        cache.settle()
        rig.check()
        assert cache.resident.sum() <= cache.room <= slots
        free = sorted([*cache._free, *cache.slots()[cache.slots() >= 0].tolist()])
        assert free == list(range(cache.room)), "every slot that has memory is free or somebody's"
