"""The search for the CPU's share against made-up windows: it finds the valley, bears noise, never leaves its range."""

from dataclasses import replace

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


def test_where_nothing_changes_it_stays_and_rests_longer_each_time():
    state, used = run(Climb(), lambda bias, n: 7e6, 2 * 24 * 32)
    assert (state.bias, state.resting, state.rest) == (0, climb.REST, 2 * climb.REST)
    assert set(used) == {-climb.STEP, 0.0, climb.STEP}
    state, used = run(state, lambda bias, n: 7e6, climb.REST)
    assert set(used) == {0.0}
    state, used = run(state, lambda bias, n: 7e6, 2 * 24 * 32)
    assert len(set(used)) == 3  # and tries again
    assert (state.resting, state.rest) == (2 * climb.REST, 4 * climb.REST)
    for _ in range(6):
        state, _ = run(replace(state, resting=0), lambda bias, n: 7e6, 2 * 24 * 32)
    assert state.rest == climb.MOST_REST


def uneven(seed, windows, share=0.1):
    """Windows differ by a tenth, half of that by topics of some hundred windows."""
    rng = np.random.default_rng(seed)
    topics = np.repeat(rng.normal(0, share / 2**0.5, windows), rng.integers(100, 400, windows))[:windows]
    return 1 + topics + rng.normal(0, share / 2**0.5, windows)


def test_uneven_windows_move_nothing_that_need_not_move():
    moved, tried = 0, 0
    for seed in range(40):
        noise, states = uneven(seed, 5000), [Climb()]
        for n in range(5000):
            states.append(after(states[-1], 1, int(7e6 * noise[n])))
        moved += len({state.bias for state in states}) - 1
        tried += sum(state.used != state.bias for state in states)
    assert moved <= 6  # of some 120 trials
    assert tried < 40 * 5000 / 6  # rest is what it mostly does


def test_uneven_windows_hide_no_twentieth():
    found = 0
    for seed in range(20):
        noise = uneven(seed, 12000)
        state, _ = run(Climb(), lambda bias, n, noise=noise: 7e6 * (1 + 0.2 * abs(bias - 0.5)) * noise[n], 12000)
        found += abs(state.bias - 0.5) <= climb.STEP
    assert found >= 18


def test_a_candidate_that_is_much_worse_is_given_up_soon():
    state, used = run(Climb(), lambda bias, n: 7e6 * (1 + abs(bias)), 2 * 6 * 32)
    assert state.resting == climb.REST
    assert sum(bias != 0 for bias in used) == 6 * 32


def test_it_stops_at_the_edge():
    state, used = run(Climb(), lambda bias, n: 7e6 * (1 - 0.05 * bias), 192 * 20)
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
