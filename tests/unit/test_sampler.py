import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.request import Sampling
from lanes.sampler import choose, largest, logprobs

floats = st.floats(-20, 20, width=32)


def naive_distribution(logits, temperature, top_k, top_p):
    """Probabilities by id, in plain Python: temperature, top-k, top-p; the lowest id wins a tie."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if top_k:
        order = order[:top_k]
    highest = float(logits[order[0]])
    weight = {i: math.exp((float(logits[i]) - highest) / temperature) for i in order}
    goal, reached, kept = top_p * math.fsum(weight.values()), 0.0, []
    for i in order:
        kept.append(i)
        reached += weight[i]
        if reached >= goal:
            break
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in kept}


def chi_square(logits, sampling, draws):
    expected = naive_distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    counts = dict.fromkeys(expected, 0)
    for position in range(draws):
        counts[choose(logits, sampling, position)] += 1  # KeyError: a token outside the kept set
    return sum((counts[i] - p * draws) ** 2 / (p * draws) for i, p in expected.items()), len(expected) - 1


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert choose(np.array([1, 3, 3, 2], np.float32), Sampling(), 0) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 0, 1.0, 3),
        Sampling(0.7, 0, 1.0, 4),
        Sampling(1.5, 5, 1.0, 5),
        Sampling(1.0, 0, 0.8, 6),
        Sampling(0.9, 6, 0.9, 7),
        Sampling(2.0, 10, 1.0, 2**64 - 1),
    ],
)
def test_draws_follow_the_distribution(sampling):
    logits = np.array([0.5, 2.0, -1.0, 1.0, 1.5, 0.0, -0.5, 0.25, 2.0, -2.0], np.float32)
    statistic, freedom = chi_square(logits, sampling, 20_000)
    # Wilson-Hilferty bound at about 1 in 10,000; the draws are fixed by the seed, so this never flakes.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


def test_chi_square_notices_a_wrong_temperature():
    logits = np.array([0.5, 2.0, -1.0, 1.0], np.float32)
    expected = naive_distribution(logits, 1.0, 0, 1.0)
    counts = [0] * 4
    for position in range(20_000):
        counts[choose(logits, Sampling(0.9, seed=1), position)] += 1
    assert sum((counts[i] - p * 20_000) ** 2 / (p * 20_000) for i, p in expected.items()) > 100


@given(st.lists(floats, min_size=1, max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_same_seed_and_position_same_token(logits, seed, position):
    row = np.array(logits, np.float32)
    sampling = Sampling(0.8, 7, 0.9, seed)
    assert choose(row, sampling, position) == choose(row.copy(), sampling, position)


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, 2.5]), min_size=1, max_size=600),
    st.floats(0.05, 5),
    st.integers(0, 700),
    st.floats(0.01, 1.0),
    st.integers(0, 2**32),
)
def test_choice_is_always_in_the_naive_kept_set(logits, temperature, top_k, top_p, seed):
    row = np.array(logits, np.float32)
    kept = naive_distribution(row, temperature, top_k, top_p)
    # A boundary within rounding of top_p may keep one more or one less; step past such cases by the next-looser set.
    loose = naive_distribution(row, temperature, top_k, min(1.0, top_p * (1 + 1e-9)))
    assert choose(row, Sampling(temperature, top_k, top_p, seed), 5) in set(kept) | set(loose)


def test_top_p_beyond_the_first_partial_sort():
    logits = np.zeros(5000, np.float32)  # all equal: top-p 0.5 keeps exactly the 2,500 lowest ids
    seen = {choose(logits, Sampling(1.0, 0, 0.5, 1), position) for position in range(2000)}
    assert max(seen) < 2500
    assert len(seen) > 800


def test_top_k_one_and_tiny_temperature_are_greedy():
    rng = np.random.default_rng(0)
    for position in range(20):
        row = rng.normal(size=300).astype(np.float32)
        best = int(row.argmax())
        assert choose(row, Sampling(50.0, 1, 1.0, 9), position) == best
        assert choose(row, Sampling(1e-30, 0, 1.0, 9), position) == best
        assert choose(row, Sampling(1e-30, 0, 0.9, 9), position) == best


def test_a_token_without_weight_is_never_drawn():
    row = np.array([0, -1e30, 0, -1e30], np.float32)
    assert {choose(row, Sampling(1.0, seed=2), p) for p in range(200)} == {0, 2}


def test_largest_prefers_low_ids_among_equals():
    row = np.array([1, 2, 2, 2, 0], np.float32)
    assert largest(row, 2).tolist() == [1, 2]
    assert largest(row, 4).tolist() == [0, 1, 2, 3]
    assert largest(row, 9).tolist() == [0, 1, 2, 3, 4]


def test_logprobs_are_those_of_the_raw_logits():
    row = np.array([0.5, 2.0, -1.0, 2.0, 1.5], np.float32)
    total = math.log(math.fsum(math.exp(float(v)) for v in row))
    found = logprobs(row, 2, 3)
    assert found.chosen == pytest.approx(-1.0 - total, abs=1e-12)
    assert [i for i, _ in found.top] == [1, 3, 4]
    assert [v for _, v in found.top] == pytest.approx([2.0 - total, 2.0 - total, 1.5 - total], abs=1e-12)


def test_logprobs_of_huge_logits_do_not_overflow():
    found = logprobs(np.array([1e30, 1e30, -1e30], np.float32), 0, 1)
    assert found.chosen == pytest.approx(-math.log(2), abs=1e-9) or found.chosen == 0.0
    assert math.isfinite(found.chosen)


def test_logprobs_ignore_temperature_and_sum_to_one():
    row = np.random.default_rng(1).normal(size=64).astype(np.float32)
    assert math.fsum(math.exp(v) for _, v in logprobs(row, 0, 64).top) == pytest.approx(1.0, abs=1e-12)
