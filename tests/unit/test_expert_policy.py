import copy
import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache_baselines import clairvoyant_hits, fixed, least_recently_used
from lanes.experts.policy import Budget, State, Touched

N = 24


def touched(*keys, rows=None):
    ids = np.array(sorted(set(keys)), np.int64)
    counts = np.ones_like(ids) if rows is None else np.array(rows, np.int64)
    return Touched(ids, counts, int(counts.max(initial=1)))


def run(windows, slots, swaps=100):
    state, plan = State.empty(N), None
    for keys in windows:
        state, plan = least_recently_used(state, touched(*keys), Budget(slots, swaps))
    return state, plan


def test_fills_free_slots_first():
    state, plan = run([(3, 1)], 4)
    assert sorted(plan.admit.tolist()) == [1, 3]
    assert plan.evict.tolist() == []
    assert np.flatnonzero(state.resident).tolist() == [1, 3]


def test_evicts_what_was_unused_for_longest():
    state, plan = run([(1, 2), (2, 3), (3, 4)], 3)
    assert plan.evict.tolist() == [1]
    assert np.flatnonzero(state.resident).tolist() == [2, 3, 4]


def test_a_tie_evicts_the_lowest_key():
    _, plan = run([(5, 4, 6), (7,)], 3)
    assert plan.evict.tolist() == [4]


def test_a_window_larger_than_the_cache_evicts_nothing_it_touched():
    state, plan = run([(1, 2), (1, 2, 3, 4)], 2)
    assert plan.admit.tolist() == plan.evict.tolist() == []
    assert np.flatnonzero(state.resident).tolist() == [1, 2]


def test_most_rows_come_first_when_swaps_are_scarce():
    state, plan = least_recently_used(State.empty(N), touched(1, 2, 3, rows=[1, 9, 5]), Budget(8, 2))
    assert plan.admit.tolist() == [2, 3]
    assert state.resident.sum() == 2


def test_no_swaps_and_no_slots():
    for budget in (Budget(0, 5), Budget(5, 0)):
        _, plan = least_recently_used(State.empty(N), touched(1, 2), budget)
        assert plan.admit.tolist() == plan.evict.tolist() == []


def test_scarce_swaps_reach_every_key_in_the_end():
    """Equal rows every window: the last keys are not starved by the first."""
    admitted = set()
    state = State.empty(N)
    for _ in range(N):
        state, plan = least_recently_used(state, touched(*range(N)), Budget(6, 2))
        admitted |= set(plan.admit.tolist())
    assert max(admitted) >= N // 4
    assert len(admitted) == 6


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, N - 1)), st.integers(0, 4)), max_size=12),
    st.integers(0, N),
)
def test_invariants_hold_for_any_history(history, slots):
    state = State.empty(N)
    for keys, swaps in history:
        seen = touched(*keys)
        before = copy.deepcopy(state)
        after, plan = least_recently_used(state, seen, Budget(slots, swaps))
        again, same = least_recently_used(state, seen, Budget(slots, swaps))
        assert np.array_equal(plan.admit, same.admit)
        assert np.array_equal(again.resident, after.resident)
        assert np.array_equal(state.resident, before.resident), "the state given was changed in place"
        assert np.array_equal(state.last_used, before.last_used)
        assert len(plan.admit) <= swaps
        assert state.resident[plan.evict].all()
        assert not state.resident[plan.admit].any()
        assert not set(plan.evict.tolist()) & set(keys)
        assert set(plan.admit.tolist()) <= set(keys)
        assert len(set(plan.admit.tolist())) == len(plan.admit)
        assert after.resident.sum() <= slots
        state = after


def test_matches_a_plain_lru_when_one_key_comes_at_a_time():
    rng = np.random.default_rng(3)
    state, plain = State.empty(N), []
    for key in rng.integers(0, N, 500).tolist():
        state, _ = least_recently_used(state, touched(key), Budget(5, 5))
        if key in plain:
            plain.remove(key)
        plain = [*plain, key][-5:]
        assert np.flatnonzero(state.resident).tolist() == sorted(plain)


def test_a_fixed_set_is_filled_once_from_its_profile():
    policy, state = fixed(np.array([5, 1, 9, 9] + [0] * (N - 4))), State.empty(N)
    state, plan = policy(state, touched(7), Budget(3, 1))
    assert plan.admit.tolist() == [0, 2, 3]
    state, plan = policy(state, touched(1), Budget(3, 1))
    assert plan.admit.tolist() == plan.evict.tolist() == []
    assert np.flatnonzero(state.resident).tolist() == [0, 2, 3]


def best_by_search(windows, slots):
    """Every choice of what to keep after every window."""
    reached = {frozenset(): 0}
    for keys in windows:
        after = {}
        for kept, hits in reached.items():
            now = hits + len(kept & keys)
            for size in range(min(slots, len(kept | keys)) + 1):
                for choice in itertools.combinations(sorted(kept | keys), size):
                    after[frozenset(choice)] = max(after.get(frozenset(choice), 0), now)
        reached = after
    return max(reached.values())


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=7), st.integers(0, 3))
def test_the_bound_is_what_an_exhaustive_search_finds(history, slots):
    hits = clairvoyant_hits([touched(*keys) for keys in history], N, slots)
    assert hits.sum() == best_by_search([frozenset(keys) for keys in history], slots)
