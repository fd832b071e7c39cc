"""The search for the CPU's share against made-up windows: it finds the valley, bears noise, never leaves its range."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts import climb
from lanes.experts.climb import Climb, after


def run(state, cost, windows, rows=lambda n: 1):
    used = []
    for n in range(windows):
        used.append(state.used)
        state = after(state, rows(n), int(cost(state.used, n)))
    return state, used


@settings(max_examples=20)
@given(st.floats(-3.5, 3.5), st.integers(0, 1 << 20))
def test_it_comes_close_to_the_best_and_stays(best, seed):
    noise = np.random.default_rng(seed).normal(1, 0.03, 8192)
    state, _ = run(Climb(), lambda bias, n: 7e6 * (1 + 0.1 * abs(bias - best)) * noise[n], 8192)
    assert abs(state.bias - best) <= 2 * climb.STEP


def test_where_nothing_changes_it_stays_and_rests():
    state, used = run(Climb(), lambda bias, n: 7e6, 300)
    assert state.bias == 0
    assert state.resting > 0
    assert set(used) == {-climb.STEP, 0.0, climb.STEP}
    state, used = run(state, lambda bias, n: 7e6, climb.REST - 60)
    assert set(used) == {0.0}
    state, used = run(state, lambda bias, n: 7e6, 300)
    assert len(set(used)) == 3  # and tries again


def test_it_stops_at_the_edge():
    state, used = run(Climb(), lambda bias, n: 7e6 * (1 - 0.05 * bias), 128 * 40)
    assert state.bias == climb.MOST_BIAS
    assert max(used) == climb.MOST_BIAS


def test_windows_of_other_sizes_are_passed_over():
    costs = {1: 7e6, 3: 9e6}
    rows = [1 + 2 * (n % 3 == 2) for n in range(5000)]
    state, _ = run(
        Climb(), lambda bias, n: costs[rows[n]] * (1 + 0.1 * abs(bias - 1)), 5000, rows=lambda n: rows[n]
    )  # fmt: skip
    assert abs(state.bias - 1) <= climb.STEP


def test_weather_that_changes_between_blocks_moves_nothing_far():
    state, _ = run(Climb(), lambda bias, n: 7e6 * (1 + 0.2 * (n // 64 % 2)), 2048)
    assert abs(state.bias) <= 2 * climb.STEP
