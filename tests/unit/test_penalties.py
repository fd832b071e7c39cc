import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.penalties import Penalties, TokenCounts
from lanes.request import Request, Sampling
from lanes.sampler import choose
from tests.fakes.naive_sampler import naive_distribution, naive_row
from tests.unit.test_sampler import statistic

VOCAB = 12
DRAWS = 5_000
tokens = st.integers(0, VOCAB - 1)
penalties = st.floats(-2, 2, width=32)
logits = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)


def a_request(prompt=(1, 2, 3), stop_ids=(), replayed=0, **sampling):
    return Request("r", tuple(prompt), 50, Sampling(**sampling), frozenset(stop_ids), replayed_tokens=replayed)


@st.composite
def requests(draw):
    bias = draw(st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.7, 2.0])),
        top_k=draw(st.sampled_from([0, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.2])),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.5, 100.0])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=draw(st.integers(0, 10)),
    )
    stop_ids = draw(st.frozensets(tokens, max_size=3))
    return Request("r", tuple(draw(st.lists(tokens, min_size=1, max_size=8))), 50, sampling, stop_ids)


@settings(max_examples=200)
@given(requests(), logits, st.lists(tokens, max_size=20))
def test_the_row_is_the_naive_one_bit_for_bit(request, values, output):
    raw = np.array(values, np.float32)
    before = raw.copy()
    fast = Penalties(request, VOCAB)
    for at in range(len(output) + 1):
        assert fast.row(raw).tolist() == naive_row(values, request, output[:at])
        if at < len(output):
            fast.add(output[at])
    assert (raw == before).all(), "the raw row, whose log-probabilities are reported, was changed"


def answer(request, rows, count):
    """The tokens of a made-up model whose logits depend on the position and on the last token."""
    ids = list(request.prompt_ids)
    fast = Penalties(request, VOCAB)
    found = []
    while len(found) < count:
        row = np.roll(rows[len(ids) % len(rows)], ids[-1])
        token = choose(fast.row(row), request.sampling, len(ids))
        fast.add(token)
        found.append(token)
        ids.append(token)
        if token in request.stop_ids:
            break
    return found


@settings(max_examples=150)
@given(requests(), st.lists(logits, min_size=3, max_size=3), st.data())
def test_a_replay_goes_on_as_the_lost_answer_would_have(request, values, data):
    rows = np.array(values, np.float32)
    whole = answer(request, rows, 20)
    cut = data.draw(st.integers(0, len(whole) - 1))
    replay = replace(request, prompt_ids=(*request.prompt_ids, *whole[:cut]), replayed_tokens=cut)
    assert answer(replay, rows, 20 - cut) == whole[cut:]


def test_replayed_tokens_are_what_makes_the_difference():
    rows = np.array([[5.0, 4.9, 4.8] + [0.0] * 9], np.float32)
    request = a_request(prompt=(11,), presence_penalty=2.0, frequency_penalty=2.0)
    whole = answer(request, rows, 9)
    blind = replace(request, prompt_ids=(11, *whole[:4]))
    assert answer(replace(blind, replayed_tokens=4), rows, 5) == whole[4:]
    assert answer(blind, rows, 5) != whole[4:]


def test_repetition_counts_the_prompt_and_the_other_two_do_not():
    row = np.array([2.0, -2.0, 4.0], np.float32)
    assert Penalties(a_request((0, 1), repetition_penalty=2.0), 3).row(row).tolist() == [1.0, -4.0, 4.0]
    others = Penalties(a_request((0, 1), presence_penalty=0.5, frequency_penalty=0.25), 3)
    assert others.row(row).tolist() == row.tolist()
    for _ in range(3):
        others.add(2)
    assert others.row(row).tolist() == [2.0, -2.0, 4.0 - 0.5 - 3 * 0.25]


def test_bias_comes_before_penalties_and_the_mask_last():
    request = a_request((0,), (2,), repetition_penalty=2.0, logit_bias=((0, -3.0), (2, 100.0)), min_tokens=1)
    row = np.array([1.0, 5.0, 0.0], np.float32)
    assert Penalties(request, 3).row(row).tolist() == [-4.0, 5.0, -math.inf]  # (1 - 3) x 2, not 1 / 2 - 3


def test_stop_ids_may_come_once_there_are_enough_tokens():
    row = np.array([0.0, 9.0], np.float32)
    two = Penalties(a_request(stop_ids=(1,), min_tokens=2), 2)
    for expected in (0, 0, 1):
        assert int(two.row(row).argmax()) == expected
        two.add(0)
    assert Penalties(a_request((0, 0, 0), (1,), replayed=2, min_tokens=2), 2).row(row) is row


def test_a_bias_of_minus_100_is_no_ban():
    request = a_request(logit_bias=tuple((token, -100.0) for token in range(3)))
    row = np.array([1.0, 3.0, 2.0], np.float32)
    changed = Penalties(request, 3).row(row)
    assert changed.tolist() == [-99.0, -97.0, -98.0]
    assert choose(changed, Sampling(), 0) == 1


def test_greedy_takes_bias_and_penalties_too():
    row = np.array([3.0, 2.5, 0.0], np.float32)
    assert choose(Penalties(a_request(logit_bias=((2, 4.0),)), 3).row(row), Sampling(), 0) == 2
    assert choose(Penalties(a_request((0,), repetition_penalty=2.0), 3).row(row), Sampling(), 0) == 1


def test_penalties_at_the_ends_of_fp32_stay_finite():
    row = np.array([3.4e38, -3.4e38], np.float32)
    for factor in (1e-30, 100.0):
        changed = Penalties(a_request((0, 1), repetition_penalty=factor), 2).row(row)
        assert np.isfinite(changed).all()


def test_without_any_the_row_itself_is_drawn_from():
    row = np.zeros(VOCAB, np.float32)
    assert Penalties(a_request(stop_ids=(1,)), VOCAB).row(row) is row


@given(st.permutations([(token, bias) for token, bias in enumerate((-3.0, 0.5, 7.0, 100.0, -100.0))]), logits)
def test_the_order_of_biases_changes_nothing(order, values):
    row = np.array(values, np.float32)
    plain = Penalties(a_request(logit_bias=tuple(sorted(order))), VOCAB).row(row)
    assert Penalties(a_request(logit_bias=tuple(order)), VOCAB).row(row).tolist() == plain.tolist()


@given(st.lists(tokens, max_size=30), st.lists(tokens, max_size=30))
def test_counts_are_the_same_whenever_the_tokens_came(first, later):
    counts = TokenCounts(VOCAB, first)
    for token in later:
        counts.add(token)
    whole = [*first, *later]
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {t: whole.count(t) for t in {*whole}}


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": ((0, 1.5), (4, -2.0), (9, 0.75))},
        {"repetition_penalty": 1.5, "top_p": 0.9},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3, "min_p": 0.05},
        {"repetition_penalty": 0.7, "presence_penalty": -1.0, "logit_bias": ((3, 2.0),), "top_k": 8},
        {
            "min_tokens": 9,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "top_k": 7,
            "top_p": 0.95,
            "min_p": 0.02,
        },
    ],
)
def test_draws_follow_the_naive_distribution(changes):
    request = a_request((1, 2, 2, 5), (7,), temperature=1.2, seed=21, **changes)
    raw = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    output = [4, 4, 9, 1, 4]
    fast = Penalties(request, VOCAB)
    for token in output:
        fast.add(token)
    expected = naive_distribution(naive_row(raw.tolist(), request, output), request.sampling)
    found, bound = statistic(fast.row(raw), request.sampling, expected, DRAWS)
    assert found < bound
    without = naive_distribution(raw.tolist(), request.sampling)
    if set(without) >= {choose(fast.row(raw), request.sampling, p) for p in range(DRAWS)}:
        assert statistic(fast.row(raw), request.sampling, without, DRAWS)[0] > bound, "the test would notice nothing"
