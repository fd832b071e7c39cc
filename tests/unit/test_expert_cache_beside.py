"""A cache that thinks while windows run: the table moves between them, plans come a window later, counts stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts.adaptive import adaptive
from lanes.experts.policy import Touched
from lanes.experts.slots import HostSlots
from tests.fakes.cache_plans import scripted
from tests.unit.test_expert_cache import EXPERTS, LAYERS, Rig

KEYS = LAYERS * EXPERTS


class Slow(HostSlots):
    """Copies that take as many questions as they are told."""

    def __init__(self, slots, record_bytes, questions):
        super().__init__(slots, record_bytes)
        self._questions = questions

    def copy(self, copies, after=None):
        arrival, left = super().copy(copies, after), [self._questions]

        class Coming:
            def here(self):
                left[0] -= 1
                return left[0] < 0

        Coming.join, Coming.took = arrival.join, arrival.took
        return Coming()


class Beside:
    """Windows of touched keys on a rig; `tables` has what was resident while each ran, `plans` what was made."""

    def __init__(self, slots, policy, questions=0):
        self.plans, self.tables, self.budgets = [], [], []

        def watched(state, touched, budget):
            state, plan = policy(state, touched, budget)
            self.plans.append(plan)
            self.budgets.append(budget)
            return state, plan

        self.rig = Rig(slots=slots, policy=watched)
        self.cache = self.rig.cache
        self.cache._slots = slow = Slow(slots, self.cache.record_bytes, questions)
        self.cache._place[:] = [slow.address(slot) for slot in range(slots)]

    def windows(self, windows, *, think=True, unread=False):
        for keys in windows:
            before = (self.cache.version, self.cache.addresses.copy(), self.cache.resident.copy())
            self.tables.append(before[2].reshape(-1))
            if think:
                self.cache.think()
            assert self.cache.version == before[0]
            assert np.array_equal(self.cache.addresses, before[1])
            assert np.array_equal(self.cache.resident, before[2])
            if unread:
                self.cache.think(unread=True)
            self.cache.pause(lambda keys=keys: Touched(np.array(keys), np.ones(len(keys), np.int64), 1))

    def paid(self, windows):
        """Admissions that were used: from the tables alone."""
        unused, count, last = np.zeros(KEYS, bool), 0, np.zeros(KEYS, bool)
        for table, keys in zip(self.tables, windows, strict=True):
            unused = (unused & table) | (table & ~last)
            count += int(unused[keys].sum())
            unused[keys] = False
            last = table
        return count


some_windows = st.lists(st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=6).map(sorted), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(some_windows, st.integers(0, 9), st.integers(0, 3), st.booleans(), st.booleans())
def test_any_windows(windows, slots, questions, think, unread):
    run = Beside(slots, adaptive, questions)
    run.windows(windows, think=think, unread=unread)
    run.cache.settle()
    counters, cache = run.rig.counters, run.cache
    assert cache.state.windows == (len(windows) if slots else 0)
    assert counters.cache_admitted_hits == run.paid(windows)
    assert counters.cache_admissions == sum(len(plan.admit) for plan in run.plans)
    assert counters.cache_evictions == sum(len(plan.evict) for plan in run.plans)
    for _ in range((questions + 1) * (len(windows) + 1)):  # each copy may be asked so often
        cache.settle()
    assert np.array_equal(cache.resident.reshape(-1), cache.state.resident)
    run.rig.check()


@settings(max_examples=40, deadline=None)
@given(some_windows, st.integers(1, 9))
def test_a_settled_cache_is_one_that_turned(windows, slots):
    beside, turned = Beside(slots, adaptive), Rig(slots=slots)
    for keys in windows:
        beside.windows([keys])
        beside.cache.settle()
        turned.cache.turn(Touched(np.array(keys), np.ones(len(keys), np.int64), 1))
        assert np.array_equal(beside.cache.slots(), turned.cache.slots())
        assert np.array_equal(beside.cache.resident, turned.cache.resident)
        assert beside.rig.counters == turned.counters


@pytest.mark.parametrize("unread", [False, True])
def test_a_plan_drops_after_the_window_beside_which_it_was_made_and_admits_one_later(unread):
    run = Beside(2, scripted(([], [1, 2]), ([1], [5]), ([], []), ([], []), ([], [])))
    run.windows([[1]] * 6, unread=unread)
    resident = [np.flatnonzero(table).tolist() for table in run.tables]
    # Beside window 1 the first plan is made, beside 2 its copies, from 3 on they are read; 1 leaves with the second.
    assert resident == [[], [], [], [2], [2, 5], [2, 5]]


def test_a_link_that_is_behind_is_asked_for_nothing_more():
    run = Beside(4, scripted(([], [1]), *[([], [])] * 9), questions=3)
    run.windows([[1]] * 8)
    swaps = [budget.swaps for budget in run.budgets]
    assert swaps[:2] != [0, 0]
    assert swaps[3:5] == [0, 0], "the copy of the first plan is under way"
    assert swaps[-1] > 0
    assert np.flatnonzero(run.cache.resident).tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(some_windows, st.integers(2, 9), st.integers(1, 8), st.integers(0, 2))
def test_what_is_put_off_may_be_thought_about_while_slots_are_lent(windows, slots, count, questions):
    """A prompt's window has just ended, and the next one borrows before anybody has thought about it."""
    run = Beside(slots, adaptive, questions)
    run.windows(windows)
    plans = len(run.plans)
    with run.cache.lend(min(count, slots - 1)) as lent:
        assert len(run.plans) == plans, "copies come first"
        before = run.cache.addresses.copy()
        run.cache.think()
        assert len(run.plans) == plans + 1
        assert run.budgets[-1].slots == run.cache.room == slots - len(lent)
        assert np.array_equal(run.cache.addresses, before), "a window runs"
        held = run.cache.slots()
        assert not set(held[held >= 0].tolist()) & set(lent)
    run.windows(windows)
    run.cache.settle()
    while run.cache._coming:
        run.cache.settle()
    run.rig.check()
    assert run.cache.room == slots


def test_what_is_put_off_at_rest_is_not_learnt_later():
    run = Beside(4, adaptive)
    run.windows([[1, 2]])
    with run.cache.at_rest():
        run.windows([[3], [4]])
    run.windows([[5]])
    run.cache.settle()
    assert run.cache.state.windows == 2
    assert np.flatnonzero(run.cache.state.resident).tolist() == [1, 2, 5]


@settings(max_examples=40, deadline=None)
@given(some_windows, st.integers(1, 9))
def test_a_table_that_moves_on_beside_a_window_is_the_one_that_would_have_moved_after_it(windows, slots):
    after, beside = Beside(slots, adaptive), Beside(slots, adaptive)
    for keys in windows:
        after.windows([keys])
        beside.windows([keys], unread=True)
        assert np.array_equal(after.cache.slots(), beside.cache.slots())
        assert np.array_equal(after.cache.resident, beside.cache.resident)
    for run in (after, beside):
        run.cache.settle()
        run.rig.check()
    assert after.rig.counters == beside.rig.counters
