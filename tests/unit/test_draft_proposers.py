"""Who proposes: copies of what was read, the chain of the draft layer's guesses; and that sampling stays as it was."""

import math
import os
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.drafts.chain import at_once, chain
from lanes.drafts.drafter import Drafter
from lanes.drafts.lookup import LEAST, MOST, Lookup
from lanes.drafts.policy import Beliefs, Guessed
from lanes.drafts.proposal import NOTHING
from lanes.request import Request, Sampling
from lanes.runner import Likeliest
from lanes.sampler import choose
from tests.fakes.drafts import convinced
from tests.fakes.naive_sampler import naive_distribution

# --- copies


def test_what_followed_the_same_tokens_is_proposed():
    words = list(range(100, 120))
    lookup = Lookup([1, *words, 2, 3])
    for token in words[: LEAST - 1]:
        lookup.add(token)
        assert lookup.propose(3) is NOTHING, "too short a match"
    lookup.add(words[LEAST - 1])
    proposal = lookup.propose(3)
    assert proposal.ids == tuple(words[LEAST : LEAST + 3])
    assert proposal.sure == (LEAST / MOST,) * 3
    assert lookup.propose(1).ids == (words[LEAST],)
    lookup.add(words[LEAST])
    assert lookup.propose(2).sure[0] > proposal.sure[0], "a longer match is surer"
    lookup.add(7)
    assert lookup.propose(3) is NOTHING


def test_the_latest_occurrence_wins_and_the_end_cuts_a_copy():
    words = list(range(100, 100 + LEAST))
    lookup = Lookup([*words, 1, *words, 2, *words])
    assert lookup.propose(3).ids[0] == 2
    repeated = Lookup([9] * (LEAST + 1))
    assert repeated.propose(3).ids == (9,), "no more than there is"


def slow(ids: list[int], most: int) -> tuple[int, ...]:
    tail = ids[-LEAST:]
    for end in range(len(ids) - 1, LEAST - 1, -1):
        if ids[end - LEAST : end] == tail:
            return tuple(ids[end : end + most])
    return ()


@given(st.lists(st.integers(0, 2), max_size=120), st.integers(1, 3), st.integers(0, 120))
def test_any_sequence_against_a_search_of_all_of_it(ids, most, cut):
    lookup = Lookup(ids[:cut])
    for token in ids[cut:]:
        lookup.add(token)
    if len(ids) >= LEAST:
        assert lookup.propose(most).ids == slow(ids, most)
    else:
        assert lookup.propose(most) is NOTHING


def test_equal_hashes_are_no_match(monkeypatch):
    lookup = Lookup(list(range(50)))
    lookup._after = dict.fromkeys(range(2**10), 20)
    monkeypatch.setattr("lanes.drafts.lookup._POWERS", [0] * LEAST)  # everything has one hash
    lookup.add(7)
    assert lookup.propose(3) is NOTHING


# --- the chain


def peaked(token: int, share: float, size: int = 40) -> np.ndarray:
    row = np.zeros(size, np.float32)
    row[token] = math.log(share * (size - 1) / (1 - share))
    return row


def test_each_guess_is_the_next_ones_input():
    asked = []

    def guess(token, number):
        asked.append((token, number))
        return peaked(token + 1, 0.9)

    proposal, guessed = chain(convinced(), guess, 5, 10, Sampling(), 3)
    assert (proposal.ids, guessed, asked) == ((6, 7, 8), Guessed(3), [(5, 0), (6, 1), (7, 2)])
    assert proposal.sure == pytest.approx((0.9, 0.9, 0.9), abs=1e-5)
    asked.clear()
    assert chain(convinced(), guess, 5, 10, Sampling(), 1)[0].ids == (6,)
    assert asked == [(5, 0)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_guess(bad):
    rows = [peaked(6, 0.9), np.full(40, bad, np.float32)]
    proposal, guessed = chain(convinced(), lambda token, number: rows[number], 5, 10, Sampling(), 3)
    assert (proposal.ids, guessed.count) == ((6,), 2)
    assert chain(convinced(), lambda token, number: None, 5, 10, Sampling(), 3)[0].ids == ()


def doubting() -> Beliefs:
    """Rows cost half a window, and what the layer is least sure of is seldom right."""
    beliefs = convinced()
    times = tuple(
        replace(mean, value=value) for mean, value in zip(beliefs.windows_ns, (100, 150, 200, 250), strict=True)
    )
    trust = {source: replace(each, right=((0.05, *(0.9,) * 7),) * 3) for source, each in beliefs.trust.items()}
    return replace(beliefs, windows_ns=times, trust=trust, round_ns=replace(beliefs.round_ns, value=100.0))


def test_doubtful_guesses_end_the_chain():
    shares = (0.9, 0.06, 0.9)
    proposal, guessed = chain(
        doubting(), lambda token, number: peaked(token + 1, shares[number]), 5, 10, Sampling(), 3
    )  # fmt: skip
    assert (proposal.ids, guessed.count) == ((6,), 2)


def test_guesses_at_once_are_asked_for_once():
    asked, vocabulary = [], [3, 8, 21, 34]

    def guesses(token, count):
        asked.append((token, count))
        return [Likeliest(place, 0.9) for place in (2, 1, 3)[:count]]

    proposal, guessed = at_once(convinced(), guesses, 5, 3, vocabulary)
    assert (proposal.ids, proposal.sure, guessed) == ((21, 8, 34), (0.9,) * 3, Guessed(3, True, (0.9,) * 3))
    assert at_once(convinced(), guesses, 5, 2)[0].ids == (2, 1)
    assert asked == [(5, 3), (5, 2)]


def test_of_guesses_at_once_those_behind_a_doubtful_one_are_given_up():
    shares = (0.9, 0.06, 0.9)
    found = [Likeliest(6 + number, share) for number, share in enumerate(shares)]
    proposal, guessed = at_once(doubting(), lambda token, count: found[:count], 5, 3)
    assert (proposal.ids, guessed) == ((6,), Guessed(3, True, shares))
    found[1] = found[2] = Likeliest(-1, 0.0)
    proposal, guessed = at_once(convinced(), lambda token, count: found[:count], 5, 3)
    assert (proposal.ids, guessed) == ((6,), Guessed(3, True, (0.9,)))
    proposal, guessed = at_once(convinced(), lambda token, count: None, 5, 3)
    assert (proposal.ids, proposal.asked, guessed) == ((), True, Guessed(3, True))


def test_what_is_never_worth_a_row_is_not_asked_for():
    trust = {source: replace(each, right=((0.05,) * 8,) * 3) for source, each in doubting().trust.items()}
    beliefs = replace(doubting(), trust=trust)
    assert at_once(beliefs, lambda token, count: pytest.fail("asked"), 5, 3) == (NOTHING, Guessed())


def test_only_greedy_requests_of_a_layer_that_chains_are_guessed_at_once():
    asked = []

    def layer(slot, token, number, best, meanwhile):
        meanwhile()
        asked.append((number, best))
        return [Likeliest(7, 0.9)] * best if best else peaked(7, 0.9)

    for chains, temperature, want in (
        (True, 0.0, [(0, 3)]), (False, 0.0, [(0, 1), (1, 1), (2, 1)]), (True, 0.7, [(0, 0), (1, 0), (2, 0)]),
    ):  # fmt: skip
        asked.clear()
        drafter = Drafter(3, layer, beliefs=convinced(), chains=chains)
        request = Request("r", (1,) * 5, 10, Sampling(temperature=temperature))
        told = []
        proposal = drafter.begin(request).propose(0, 1, 4, 3, lambda: told.append(len(asked)))  # noqa: B023
        assert (len(proposal.ids), asked) == (3, want)
        assert told == [0], "once, beside the first guess"


def test_a_narrow_vocabulary_is_translated():
    vocabulary = [3, 8, 21, 34]
    asked = []

    def guess(token, number):
        asked.append(token)
        return peaked(2 - number, 0.9, 4)

    assert chain(convinced(), guess, 5, 10, Sampling(), 3, vocabulary)[0].ids == (21, 8, 3)
    assert asked == [5, 21, 8]


def test_a_hot_guess_is_the_models_own_draw_where_both_agree():
    for seed in range(50):
        sampling = Sampling(temperature=1.3, seed=seed, top_p=0.9)
        rows = [np.random.default_rng((seed, n)).standard_normal(40).astype(np.float32) for n in range(3)]
        proposal, _ = chain(convinced(), lambda token, number: rows[number], 5, 10, sampling, 3)  # noqa: B023
        assert proposal.ids == tuple(choose(row, sampling, 10 + n) for n, row in enumerate(rows))


# --- the distribution


COUNT = int(os.environ.get("EXPRESSWAY_DRAFT_SEEDS", "4000"))  # once by hand: 100,000


def test_tokens_come_with_their_own_probability_and_drafts_with_theirs():
    """Chi-square over pairs of tokens against the exact distribution, by the engine's rule: a row's token is drawn from
    the model, and the next row counts when the draft is that token. The draft layer is a bit off."""
    base = np.random.default_rng(1).standard_normal((12, 12)).astype(np.float32) * 1.5
    off = base + np.random.default_rng(2).standard_normal((12, 12)).astype(np.float32) * 0.7
    firsts, pairs, right = Counter(), Counter(), Counter()
    for seed in range(COUNT):
        sampling = Sampling(temperature=1.0, seed=seed, top_k=9)
        drafts = {"same number": choose(off[3], sampling, 10), "likeliest": int(off[3].argmax())}
        first = choose(base[3], sampling, 10)
        right.update(how for how, draft in drafts.items() if first == draft)
        firsts[first] += 1
        pairs[first, choose(base[first], sampling, 11)] += 1
    p = naive_distribution(base[3], Sampling(temperature=1.0, top_k=9))
    rows = {a: naive_distribution(base[a], Sampling(temperature=1.0, top_k=9)) for a in p}
    expected = {(a, b): p[a] * share for a in p for b, share in rows[a].items()}
    assert set(pairs) <= set(expected), "only what may be drawn was drawn"
    assert chi_square(firsts, p) < 27, "8 degrees of freedom: p < 0.001 beyond"
    kept = {pair: share for pair, share in expected.items() if share * COUNT >= 5}
    assert chi_square(pairs, kept) < 2 * len(kept)
    share = p.get(int(off[3].argmax()), 0.0)  # a draft that is one token is right with that token's own probability
    assert abs(right["likeliest"] / COUNT - share) < 5 * math.sqrt(share * (1 - share) / COUNT)
    assert right["same number"] > right["likeliest"]


def chi_square(seen: Counter, expected: dict) -> float:
    count = sum(seen.values())
    return sum((seen[key] - share * count) ** 2 / (share * count) for key, share in expected.items())


def test_what_follows_a_wrong_draft_is_what_is_left():
    """The residual: given that the draft d was wrong, a token comes with p / (1 - p(d))."""
    row = np.random.default_rng(5).standard_normal(8).astype(np.float32)
    p = naive_distribution(row, Sampling(temperature=1.0))
    draft, others = 2, Counter()
    for seed in range(COUNT):
        token = choose(row, Sampling(temperature=1.0, seed=seed), 4)
        if token != draft:
            others[token] += 1
    assert chi_square(others, {t: share / (1 - p[draft]) for t, share in p.items() if t != draft}) < 25


def test_fresh_beliefs_propose_nothing():
    random.seed(1)
    drafting = Drafter(3, lambda *_: peaked(1, 0.9), beliefs=Beliefs()).begin(Request("r", (1,) * 40, 10))
    assert drafting.propose(0, 1, 40, 3) is NOTHING, "before anything was measured"
    assert Drafter(3, None, beliefs=convinced()).begin(Request("r", (1,) * 40, 10)).propose(0, 1, 40, 2).ids == (1,)
