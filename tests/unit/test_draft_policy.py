"""How many drafts: the policy against simulated lanes with a clock of their own. Never below 0.95 of no drafts."""

import itertools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lanes.drafts import policy
from lanes.drafts.drafter import Drafter
from lanes.drafts.policy import Beliefs, Mean, Round, learn, level, may_try
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS
from lanes.request import Request

MS = 1_000_000
LANES = {  # windows of 1..4 rows, and a guess, in units of a window of one row
    "rows are nearly free": ((1.0, 1.05, 1.1, 1.15), 0.05),
    "rows cost a half": ((1.0, 1.5, 2.0, 2.5), 0.1),
    "rows cost as much as tokens": ((1.0, 2.0, 3.0, 4.0), 0.15),
    "rows cost more than tokens": ((1.0, 2.5, 4.5, 6.0), 0.6),
}


@dataclass
class Lane:
    """A simulated lane: draft i is right with probability `right(sure)`, its proposer says how sure it is."""

    windows: tuple[float, ...]
    guess: float
    sure: object  # random -> how sure the proposer is of a draft
    right: object  # how sure -> probability
    seed: int = 0
    noise: float = 0.0
    stalls: float = 0.0
    now_ns: int = 0
    rows: list = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.drafter = Drafter(3, self._ask, clock=lambda: self.now_ns)

    def _ask(self, slot, token, number, best):
        self._spend(self.guess)
        share = min(max(self.sure(self.random), 0.021), 0.999)  # of token 0; the rest is spread over 49
        row = np.zeros(50, np.float32)
        row[0] = math.log(share * 49 / (1 - share))
        return row

    def _spend(self, units):
        factor = math.exp(self.random.gauss(0, self.noise)) if self.noise else 1.0
        if self.stalls and self.random.random() < self.stalls:
            factor *= 40
        self.now_ns += int(10 * MS * units * factor)

    def run(self, tokens):
        """Single-row windows that this many tokens took."""
        drafting, began_ns, sent = self.drafter.begin(Request("r", (1,), 10**6)), self.now_ns, 0
        while sent < tokens:
            proposal = drafting.propose(0, 1, 5, 3)
            count = len(proposal.ids)
            self.rows.append(1 + count)
            before_ns = self.now_ns
            self._spend(self.windows[count])
            right = 0
            while right < count and self.random.random() < self.right(proposal.sure[right]):
                right += 1
            drafting.learn(proposal, right, min(count, right + 1), self.now_ns - before_ns)
            sent += 1 + right
        return (self.now_ns - began_ns) / (10 * MS), sent


def confident(rng):
    return 0.97


def mixed(rng):
    return rng.random()


def doubtful(rng):
    return rng.random() * 0.3


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("sure", [confident, mixed, doubtful])
def test_nothing_is_ever_right(lane, sure):
    for tokens in (100, 300, 1500):
        spent, sent = Lane(*LANES[lane], sure, lambda share: 0.0).run(tokens)
        # the account's first windows are spent once in a lane's life
        assert (spent - policy.FIRST) / sent <= 1 / 0.95, (tokens, spent / sent)
    assert spent / sent <= 1 / 0.95


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.65, 0.8, 0.95])
def test_whatever_is_right_no_lane_is_slower(lane, share):
    for seed in range(2):
        spent, sent = Lane(*LANES[lane], confident, lambda _: share, seed).run(800)
        assert spent / sent <= 1 / 0.95


@pytest.mark.parametrize(("lane", "share", "gain"), [  # a perfect policy: 1.46, 1.81, 2.27, 3.08; 1.13, 1.43
    ("rows are nearly free", 0.5, 1.36), ("rows are nearly free", 0.65, 1.7), ("rows are nearly free", 0.8, 2.15),
    ("rows are nearly free", 1.0, 2.95), ("rows cost a half", 0.8, 1.06), ("rows cost a half", 1.0, 1.38),
])  # fmt: skip
def test_what_pays_is_used(lane, share, gain):
    for seed in range(2):
        spent, sent = Lane(*LANES[lane], confident, lambda _: share, seed).run(1500)
        assert sent / spent >= gain, sent / spent


def test_sure_drafts_pay_where_doubtful_ones_do_not():
    """Half of the drafts are always right and known to be, the others never: the gate keeps the first."""
    lane = Lane(*LANES["rows cost a half"], lambda rng: rng.choice((0.1, 0.95)), lambda share: float(share > 0.5))
    spent, sent = lane.run(3000)
    assert sent / spent > 1.05


def test_a_lane_that_pays_goes_on_without_pauses():
    lane = Lane(*LANES["rows are nearly free"], confident, lambda _: 0.9)
    lane.run(2000)
    late = lane.rows[100:]
    assert sum(rows > 1 for rows in late) / len(late) > 0.95
    assert 1 in late, "the time of a single row is measured again and again"


def test_text_that_changes():
    """Good, then hopeless, then good: the account bears the turn, and drafts come back."""
    share = [0.9]
    lane = Lane(*LANES["rows are nearly free"], confident, lambda _: share[0])
    lane.run(600)
    share[0] = 0.0
    spent, sent = lane.run(600)
    assert (spent - policy.MOST_SPARE) / sent <= 1 / 0.95
    share[0] = 0.9
    spent, sent = lane.run(3000)
    assert sent / spent > 1.8


@pytest.mark.parametrize("lane", LANES)
def test_noise_and_stalls(lane):
    """Times that jitter by a fifth, and stand still forty times as long once in two hundred windows."""
    for share in (0.0, 0.5, 0.9):
        noisy = Lane(*LANES[lane], confident, lambda _: share, 1, noise=0.2, stalls=0.005)  # noqa: B023
        plain = Lane(*LANES[lane], confident, lambda _: share, 1, noise=0.2, stalls=0.005)  # noqa: B023
        plain.drafter.most = 0
        spent, sent = noisy.run(2500)
        alone, alone_sent = plain.run(2500)
        assert (alone / alone_sent) / (spent / sent) > 0.85, share  # a stall hits whom it hits


def test_the_first_windows_are_single_and_most_is_kept():
    lane = Lane(*LANES["rows are nearly free"], confident, lambda _: 1.0)
    lane.run(400)
    assert lane.rows[: policy.SINGLES] == [1] * policy.SINGLES
    assert max(lane.rows) == 4
    singles = [number for number, rows in enumerate(lane.rows) if rows == 1]
    assert max(b - a for a, b in itertools.pairwise(singles)) <= policy.SINGLE_EVERY + 1


def test_what_the_account_cannot_bear_is_not_tried():
    times = tuple(Mean(float(ns), 9) for ns in (100, 180, 300, 900))
    for spare, most in ((0.0, 0), (0.79, 0), (0.8, 1), (1.99, 1), (2.0, 2), (7.99, 2), (8.0, 3)):
        assert may_try(Beliefs(windows_ns=times, spare=spare + 1e-9), "lookup", 3) == most, spare
    assert may_try(Beliefs(windows_ns=times, spare=8.1), "lookup", 2) == 2
    assert may_try(Beliefs(windows_ns=times, spare=8.1, guess_ns=Mean(10.0, 9)), "layer", 3) == 2
    assert may_try(Beliefs(windows_ns=times, spare=8.1, since_single=policy.SINGLE_EVERY), "lookup", 3) == 0
    assert may_try(Beliefs(spare=8.1), "lookup", 3) == 0, "nothing is known"


def test_a_place_that_seemed_hopeless_is_tried_again_and_what_is_checked_counts():
    hopeless = policy.Trust(((0.9,) * policy.LEVELS, (0.1,) * policy.LEVELS, (0.2,) * policy.LEVELS), Mean(0.1, 99))
    trust = {**Beliefs().trust, "layer": hopeless}
    beliefs = Beliefs(windows_ns=tuple(Mean(float(ns), 99) for ns in (100, 130, 160, 190)), trust=trust)
    one = Proposal("layer", (5,), (0.95,))
    for _ in range(200):
        beliefs = learn(beliefs, Round(one, 1, 10, 130, 1, 1))
    first, second, third = beliefs.trust["layer"].right
    assert first[7] > 0.99
    assert second[7] > 0.85
    assert third[7] > 0.7
    three = Proposal("layer", (5, 6, 7), (0.95,) * 3)
    for _ in range(200):
        beliefs = learn(beliefs, Round(three, 3, 3, 130, 1, 2))
    assert beliefs.trust["layer"].right[1][7] < 0.05, "it was looked at"
    assert beliefs.trust["layer"].right[2] == third, "it was proposed, and not reached"


proposals = st.builds(
    lambda source, sure: Proposal(source, tuple(range(len(sure))), tuple(sure), asked=True),
    st.sampled_from(["layer", "lookup"]), st.lists(st.floats(0, 1), max_size=MAX_DRAFTS),
)  # fmt: skip


@st.composite
def rounds(draw):
    proposal = draw(st.one_of(proposals, st.just(NOTHING)))
    right = draw(st.integers(0, len(proposal.ids)))
    checked = min(len(proposal.ids), right + draw(st.integers(0, 1)))
    times = st.integers(0, 10**13)
    return Round(proposal, draw(st.integers(0, 3)), draw(times), draw(times), right, checked)


@settings(max_examples=60)
@given(st.lists(rounds(), min_size=1, max_size=40))
@example([Round(NOTHING, 0, 0, 0, 0, 0)] * 40)  # a clock that stands still
def test_any_rounds_leave_sound_beliefs(history):
    beliefs = Beliefs()
    for done in history:
        before, shown = beliefs, repr(beliefs)
        beliefs = learn(beliefs, done)
        assert repr(before) == shown, "what came in is not changed"
        assert beliefs.spare <= policy.MOST_SPARE
        for trust in beliefs.trust.values():
            assert all(0 <= share <= 1 for row in trust.right for share in row)
            assert 0 <= trust.pause <= policy.MOST_PAUSE
        for rows in range(1, MAX_WINDOW_TOKENS + 1):
            assert math.isfinite(beliefs.window_ns(rows))
        assert math.isfinite(beliefs.rate())
        for source in ("layer", "lookup"):
            assert 0 <= may_try(beliefs, source, 3) <= 3
            policy.worth(beliefs, source, [0.5, 0.9])
        policy.worth_guessing(beliefs, [0.5])


def test_levels():
    assert [level(x) for x in (-1.0, 0.0, 0.12, 0.13, 0.5, 0.99, 1.0, 2.0)] == [0, 0, 0, 1, 4, 7, 7, 7]
