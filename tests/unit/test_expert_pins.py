"""Pins get their slots first and keep them, and whatever another policy does stays within the rest."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts.adaptive import adaptive, begun
from lanes.experts.pinned import SHARE, with_pins
from lanes.experts.policy import Budget, State, Touched

KEYS = 60
PINS = np.arange(50, 56)


def window(rng, rows=1):
    keys = np.unique(rng.integers(0, KEYS, 12))
    return Touched(keys, rng.integers(1, rows + 1, keys.shape[0]), rows)


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 9), st.booleans())
def test_pins_stay_and_the_budget_holds(seed, slots, swaps, remembered):
    rng, policy, budget = np.random.default_rng(seed), with_pins(adaptive, PINS), Budget(slots, swaps)
    state = begun(rng.random(KEYS) * 9, slots) if remembered else State.empty(KEYS)
    fits = PINS.shape[0] <= SHARE * slots
    pinned = state.resident[PINS]
    for number in range(30):
        before = state.resident.copy()
        state, plan = policy(state, window(rng, rows=int(rng.integers(1, 40))), budget)
        assert before[plan.evict].all()
        assert not before[plan.admit].any()
        after = before.copy()
        after[plan.evict] = False
        assert np.count_nonzero(after) + plan.admit.shape[0] <= slots
        after[plan.admit] = True
        assert np.array_equal(after, state.resident)
        assert plan.admit.shape[0] <= swaps
        if fits:
            assert state.resident[PINS][pinned].all(), "a pin is never evicted"
            pinned = state.resident[PINS]
            assert pinned.all() or number < -(-PINS.shape[0] // swaps)


def test_where_they_do_not_fit_they_are_like_any():
    rng, budget = np.random.default_rng(0), Budget(20, 4)
    assert PINS.shape[0] > SHARE * budget.slots
    plain = pinned = State.empty(KEYS)
    for _ in range(50):
        touched = window(rng)
        plain, plan = adaptive(plain, touched, budget)
        pinned, same = with_pins(adaptive, PINS)(pinned, touched, budget)
        assert np.array_equal(plan.admit, same.admit)
        assert np.array_equal(plan.evict, same.evict)


def test_at_the_limit_and_one_slot_less():
    nothing = Touched(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
    for slots, admitted in ((48, 6), (47, 0)):
        _, plan = with_pins(adaptive, PINS)(State.empty(KEYS), nothing, Budget(slots, 10))
        assert plan.admit.shape[0] == admitted
