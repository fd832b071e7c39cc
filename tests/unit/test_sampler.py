import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.request import Sampling
from lanes.sampler import _nucleus, choose, largest, logprobs
from tests.fakes.naive_sampler import naive_distribution

floats = st.floats(-20, 20, width=32)
DRAWS = 5_000
SPREAD = np.array([0.5, 2.0, -1.0, 1.0, 1.5, 0.0, -0.5, 0.25, 2.0, -2.0], np.float32)


def statistic(row, sampling, expected, draws):
    """Pearson's statistic of `draws` choices, and the value that one in 10,000 honest samplers would exceed."""
    counts = dict.fromkeys(expected, 0)
    for position in range(draws):
        counts[choose(row, sampling, position)] += 1  # KeyError: a token outside the kept set
    found = sum((counts[token] - p * draws) ** 2 / (p * draws) for token, p in expected.items())
    freedom = max(1, len(expected) - 1)
    # Wilson and Hilferty's approximation; the draws are fixed by the seed, so this never flakes.
    return found, freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


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
        Sampling(1.0, seed=8, min_p=0.15),
        Sampling(0.6, 7, 1.0, 9, min_p=0.1),
        Sampling(1.3, 0, 0.9, 10, min_p=0.2),
        Sampling(1.1, 8, 0.95, 11, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(sampling):
    found, bound = statistic(SPREAD, sampling, naive_distribution(SPREAD, sampling), DRAWS)
    assert found < bound


@pytest.mark.parametrize("sampling", [Sampling(1.0, seed=3), Sampling(1.2, 0, 0.97, 4), Sampling(1.0, 900, 1.0, 5)])
def test_draws_from_many_blocks_follow_the_distribution(sampling):
    row = np.random.default_rng(5).normal(size=1_300).astype(np.float32)  # three blocks, the last one short
    expected = naive_distribution(row, sampling)
    folded = {}  # 1,300 ids are too many to expect some of each: by id modulo 37
    for token, p in expected.items():
        folded[token % 37] = folded.get(token % 37, 0.0) + p
    counts = dict.fromkeys(folded, 0)
    for position in range(DRAWS):
        token = choose(row, sampling, position)
        assert token in expected
        counts[token % 37] += 1
    found = sum((counts[i] - p * DRAWS) ** 2 / (p * DRAWS) for i, p in folded.items())
    assert found < 36 * (1 - 2 / (9 * 36) + 3.72 * math.sqrt(2 / (9 * 36))) ** 3


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        (Sampling(0.9, seed=1), Sampling(1.0)),
        (Sampling(1.0, 0, 0.95, 1), Sampling(1.0)),
        (Sampling(1.0, seed=1, min_p=0.2), Sampling(1.0)),
    ],
)
def test_the_statistic_notices_wrong_samplers(drawn, claimed):
    row = np.array([0.5, 2.0, -1.0, 1.0, -9.0], np.float32)
    try:
        found, bound = statistic(row, drawn, naive_distribution(row, claimed), 20_000)
    except KeyError:
        return
    assert found > 3 * bound


@given(st.lists(floats, min_size=1, max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_same_seed_and_position_same_token(logits, seed, position):
    row = np.array(logits, np.float32)
    sampling = Sampling(0.8, 7, 0.9, seed, min_p=0.01)
    assert choose(row, sampling, position) == choose(row.copy(), sampling, position)


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 1500),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
    min_p=st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]),
)


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([-math.inf, -8.0, -1.0, 0.0, 0.5, 2.0, 2.5]), min_size=1, max_size=60),
    st.integers(1, 40),
    samplings,
)
def test_the_kept_set_is_the_naive_one(pattern, repeats, sampling):
    row = np.array(pattern * repeats, np.float32)  # full of ties, several blocks when long
    if not np.isfinite(row).any():
        row[len(row) // 2] = 1.0
    seen = {choose(row, sampling, position) for position in range(25)}
    # A boundary within rounding of top_p or min_p may go either way: the next looser and the next stricter set.
    loose = naive_distribution(row, near(sampling, 1e-5))
    strict = naive_distribution(row, near(sampling, -1e-5))
    assert seen <= set(loose)
    if min(strict.values()) > 0.3:  # then 25 draws miss one of them once in 7,000
        assert seen >= set(strict)


def near(sampling, by):
    return replace(sampling, top_p=min(1.0, sampling.top_p * (1 + by)), min_p=min(1.0, sampling.min_p * (1 - by)))


@settings(max_examples=40)
@given(st.integers(1, 3000), st.integers(1, 200), st.integers(0, 2**32))
def test_what_is_kept_of_equal_logits_are_the_lowest_ids(size, kept, seed):
    row = np.zeros(size, np.float32)
    kept = min(kept, size)
    for sampling in (Sampling(1.0, kept, 1.0, seed), Sampling(1.0, 0, (kept - 0.5) / size, seed)):
        seen = {choose(row, sampling, position) for position in range(40)}
        assert max(seen) < kept
        assert len(seen) >= min(kept, 40) / 4


def test_top_p_of_a_flat_row_keeps_the_lowest_ids():
    logits = np.zeros(5000, np.float32)  # all equal: top-p 0.5 keeps exactly the 2,500 lowest ids
    seen = {choose(logits, Sampling(1.0, 0, 0.5, 1), position) for position in range(2000)}
    assert max(seen) < 2500
    assert len(seen) > 800


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99, 0.99999, math.nextafter(1, 0)])
def test_top_p_at_a_true_vocabulary(top_p):
    row = (3 * np.random.default_rng(2).standard_normal(20_000)).astype(np.float32)
    row[777] = 14.0
    for temperature in (0.3, 1.0):
        sampling = Sampling(temperature, 0, top_p, 1)
        seen = {choose(row, sampling, position) for position in range(60)}
        assert seen <= set(naive_distribution(row, near(sampling, 1e-6)))


@settings(max_examples=40)
@given(st.integers(4_097, 9_000), st.sampled_from([0.0, 1e-6, 0.3, 2.0]), st.floats(0.05, 0.999), st.integers(0, 2**32))
def test_the_nucleus_of_many_candidates_is_that_of_a_sort(size, spread, top_p, seed):
    logits = (spread * np.random.default_rng(seed).standard_normal(size)).round(3).astype(np.float32)  # with ties
    weights = np.exp(logits.astype(np.float64))
    goal = top_p * float(weights.sum())
    order = np.argsort(-logits, kind="stable")
    needed = int(np.searchsorted(np.cumsum(weights[order]), goal)) + 1
    kept = _nucleus(logits, weights, goal).tolist()
    assert kept in [sorted(order[:n].tolist()) for n in (needed - 1, needed, needed + 1)]  # sums round differently


def test_always_one_token_is_kept():
    row = np.random.default_rng(0).normal(size=300).astype(np.float32)
    best = int(row.argmax())
    for position in range(20):
        for sampling in (
            Sampling(50.0, 1, 1.0, 9),
            Sampling(1e-30, 0, 1.0, 9),
            Sampling(1e-30, 0, 0.9, 9),
            Sampling(1e-30, 0, 1.0, 9, min_p=1e-9),
            Sampling(1.0, 0, 1e-38, 9),
            Sampling(1.0, 0, 1.0, 9, min_p=1.0),
            Sampling(1.0, 20, 1e-9, 9, min_p=1.0),
        ):
            assert choose(row, sampling, position) == best


def test_min_p_of_one_keeps_all_of_the_likeliest():
    row = np.array([1, 3, 0, 3, 3], np.float32)
    assert {choose(row, Sampling(1.0, min_p=1.0, seed=3), p) for p in range(100)} == {1, 3, 4}


def test_min_p_at_its_boundary_keeps_the_token():
    row = np.array([0.0, math.log(0.25), -5.0], np.float32)
    at = math.exp(float(row[1]))
    kept = {choose(row, Sampling(1.0, min_p=at, seed=3), p) for p in range(200)}
    over = {choose(row, Sampling(1.0, min_p=at * (1 + 1e-12), seed=3), p) for p in range(200)}
    assert (kept, over) == ({0, 1}, {0})


@pytest.mark.parametrize("lowest", [-1e30, -math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.0, 3), Sampling(1.0, 0, 0.99), Sampling(1.0, min_p=0.1)]
)
def test_a_token_without_weight_is_never_drawn(lowest, sampling):
    row = np.array([0, lowest, 0, lowest], np.float32)
    assert {choose(row, replace(sampling, seed=2), p) for p in range(200)} == {0, 2}


def test_a_single_finite_logit_is_taken():
    row = np.full(2000, -np.inf, np.float32)
    row[1999] = -3.0
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 5), Sampling(1.0, 0, 0.5), Sampling(1.0, min_p=0.5)):
        assert choose(row, sampling, 4) == 1999


def test_extreme_logits_overflow_nothing():
    row = np.array([-3.4e38, 3.4e38, 0.0, 3.4e38], np.float32)
    for sampling in (Sampling(1e-3), Sampling(100.0, 2), Sampling(1.0, 0, 0.9), Sampling(100.0, min_p=0.5)):
        assert {choose(row, sampling, p) for p in range(60)} == {1, 3}


def test_largest_prefers_low_ids_among_equals():
    row = np.array([1, 2, 2, 2, 0], np.float32)
    assert largest(row, 2).tolist() == [1, 2]
    assert largest(row, 4).tolist() == [0, 1, 2, 3]
    assert largest(row, 9).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(1, 20_000), st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**32))
def test_largest_is_the_head_of_a_stable_sort(size, kinds, count, seed):
    row = np.random.default_rng(seed).integers(0, kinds, size).astype(np.float32)
    assert largest(row, count).tolist() == sorted(np.argsort(-row, kind="stable")[:count].tolist())


def test_logprobs_are_those_of_the_raw_logits():
    row = np.array([0.5, 2.0, -1.0, 2.0, 1.5], np.float32)
    total = math.log(math.fsum(math.exp(float(v)) for v in row))
    found = logprobs(row, 2, 3)
    assert found.chosen == pytest.approx(-1.0 - total, abs=1e-6)
    assert [i for i, _ in found.top] == [1, 3, 4]
    assert [v for _, v in found.top] == pytest.approx([2.0 - total, 2.0 - total, 1.5 - total], abs=1e-6)


def test_logprobs_of_huge_logits_do_not_overflow():
    found = logprobs(np.array([1e30, 1e30, -1e30], np.float32), 0, 1)
    assert found.chosen == pytest.approx(-math.log(2), abs=1e-9) or found.chosen == 0.0
    assert math.isfinite(found.chosen)


def test_logprobs_ignore_temperature_and_sum_to_one():
    row = np.random.default_rng(1).normal(size=64).astype(np.float32)
    assert math.fsum(math.exp(v) for _, v in logprobs(row, 0, 64).top) == pytest.approx(1.0, abs=1e-6)
