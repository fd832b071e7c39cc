"""How many drafts: the policy against simulated lanes with a clock of their own. Never below 0.95 of no drafts."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lanes.drafts import policy
from lanes.drafts.drafter import Drafter
from lanes.drafts.policy import Beliefs, Guessed, Round, learn, level, may_try
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.drafts.times import Mean
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS
from lanes.request import Request
from lanes.runner import Likeliest

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
    chains: float = 0.0  # a further guess at once, in units; 0: this lane guesses step by step
    first: float = 1.0  # how many times as long the first window of a size takes
    unsettled: int = 1  # or so many first ones
    now_ns: int = 0
    rows: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.drafter = Drafter(3, self._ask, clock=lambda: self.now_ns, chains=self.chains > 0)

    def _ask(self, slot, token, number, best, meanwhile):
        self.asked.append(best)
        meanwhile()
        self._spend(self.guess + self.chains * (best - 1) * (self.chains > 0))
        if self.chains:
            return [Likeliest(0, self._share()) for _ in range(best)]
        share = self._share()
        row = np.zeros(50, np.float32)
        row[0] = math.log(share * 49 / (1 - share))
        return row

    def _share(self):
        return min(max(self.sure(self.random), 0.021), 0.999)  # of token 0; the rest is spread over 49

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
            before_ns, new = self.now_ns, count and self.rows.count(1 + count) <= self.unsettled
            self._spend(self.windows[count] * (self.first if new else 1.0))
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


H200 = {  # windows of 1..4 rows, a guess, a further one at once, how many times as long the first one of a size takes
    "a quarter misses": ((1.0, 1.45, 1.9, 2.35), 0.035, 0.02, 2.2),
    "all in VRAM": ((1.0, 1.35, 1.6, 1.8), 0.05, 0.035, 3.0),
}


@pytest.mark.parametrize("lane", H200)
@pytest.mark.parametrize("sure", [confident, mixed])
def test_a_lane_that_begins_with_hopeless_drafts_loses_little(lane, sure):
    """Nothing is right, and the first window of a size fetches what nobody has used: it takes two or three times as
    long."""
    windows, guess, further, first = H200[lane]
    for seed in range(5):
        lost = Lane(windows, guess, sure, lambda _: 0.0, seed, noise=0.03, chains=further, first=first)
        spent, sent = lost.run(100)
        assert sent / spent > 0.945, sent / spent
        assert max(lost.rows) == 2, "no more drafts than were ever right, and one"


@pytest.mark.parametrize(("lane", "gain"), [("a quarter misses", 1.05), ("all in VRAM", 1.12)])
def test_what_pays_is_found_though_first_windows_are_slow(lane, gain):
    windows, guess, further, first = H200[lane]
    gains = []
    for seed in range(10):
        one = Lane(windows, guess, confident, lambda _: 0.75, seed, noise=0.03, chains=further, first=first)
        one.run(100)
        spent, sent = one.run(300)
        gains.append(sent / spent)
    assert sum(gains) / len(gains) > gain, gains
    spent, sent = Lane(windows, guess, confident, lambda _: 1.0, chains=further, first=first).run(300)
    assert sent / spent > 1.45


def test_sizes_whose_first_times_were_long_are_tried_again():
    """Three first windows of every size take twice as long, and the lane is to know better soon."""
    windows, guess, further, _ = H200["all in VRAM"]
    gains = []
    for seed in range(20):
        lane = Lane(
            windows, guess, confident, lambda _: 0.75, seed, noise=0.03, chains=further, first=2.0, unsettled=3
        )  # fmt: skip
        lane.run(500)
        spent, sent = lane.run(500)
        gains.append(sent / spent)
    assert sum(gains) / len(gains) > 1.2, gains


@pytest.mark.parametrize(("windows", "share", "gain"), [  # a perfect policy: 1.52, 1.652, 2.344
    ((1.0, 1.2, 2.2, 3.2), 0.9, 1.46), ((1.0, 1.1, 2.0, 2.1), 0.9, 1.58), ((1.0, 1.1, 1.2, 2.0), 1.0, 2.25),
])  # fmt: skip
def test_a_size_that_is_truly_long_is_tried_now_and_then_only(windows, share, gain):
    gains = []
    for seed in range(6):
        lane = Lane(windows, 0.05, confident, lambda _: share, seed, noise=0.03, chains=0.03, first=2.2)
        lane.run(500)
        spent, sent = lane.run(2000)
        gains.append(sent / spent)
    assert sum(gains) / len(gains) > gain, gains


def test_a_longer_window_that_was_shorter_tells_of_a_shorter_one():
    known = Beliefs(windows_ns=(Mean(40.0, 9), Mean(74.0, 3), Mean(65.0, 9), Mean(71.0, 9)))
    assert [known.window_ns(rows) for rows in (1, 2, 3, 4)] == [40.0, 65.0, 65.0, 71.0]
    one = Round(NOTHING, Guessed(), 0, 40, 0, 0)
    after = known
    for _ in range(200):
        after = learn(after, one)
    assert after.window_ns(2) < 55.0, "on the line of the others"
    assert after.window_ns(4) == pytest.approx(71.0), "below its line, it stays what it was measured"


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("sure", [confident, mixed, doubtful])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_guesses_at_once_make_no_lane_slower(lane, sure, share):
    windows, guess = LANES[lane]
    for tokens in (300, 1500):
        spent, sent = Lane(windows, guess, sure, lambda _: share, 2, chains=0.7 * guess).run(tokens)
        assert (spent - policy.FIRST) / sent <= 1 / 0.95, (tokens, spent / sent)


def test_no_more_guesses_at_once_than_bring_something():
    """Rows cost a third: at 60 % the second draft pays no more, and is not asked for; at 95 % all do."""
    for share, asked in ((0.6, 1), (0.95, 3)):
        lane = Lane((1.0, 1.3, 1.7, 2.1), 0.05, confident, lambda _: share, 3, chains=0.04)  # noqa: B023
        lane.run(1500)
        late = lane.asked[-200:]
        assert late.count(asked) > 130, (share, late)


def test_the_time_of_guesses_at_once_is_measured_by_their_number():
    calls = (Mean(100.0, 9), Mean(), Mean(240.0, 2))
    beliefs = Beliefs(guess_ns=Mean(90.0, 9), calls_ns=calls)
    assert [beliefs.guesses_ns(n, at_once=True) for n in (1, 2, 3)] == [100.0, 200.0, 240.0]
    assert [beliefs.guesses_ns(n, at_once=False) for n in (1, 2, 3)] == [90.0, 180.0, 270.0]
    assert Beliefs(guess_ns=Mean(90.0, 9)).guesses_ns(2, at_once=True) == 180.0
    three = Round(Proposal("layer", (5,), (0.9,)), Guessed(3, True, (0.9, 0.3, 0.2)), 210, 100, 1, 1)
    after = learn(beliefs, three)
    assert (after.calls_ns[:2], after.calls_ns[2].value) == (calls[:2], 210.0), "first times may be long"
    assert learn(replace(beliefs, calls_ns=(*calls[:2], Mean(240.0, 8))), three).calls_ns[2].value == 236.25
    assert after.guess_ns.value < 90
    assert [max(range(8), key=row.__getitem__) for row in after.trust["layer"].seen] == [7, 2, 1]


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
        beliefs = learn(beliefs, Round(one, Guessed(1), 10, 130, 1, 1))
    first, second, third = beliefs.trust["layer"].right
    assert first[7] > 0.99
    assert second[7] > 0.85
    assert third[7] > 0.7
    three = Proposal("layer", (5, 6, 7), (0.95,) * 3)
    for _ in range(200):
        beliefs = learn(beliefs, Round(three, Guessed(3), 3, 130, 1, 2))
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
    sure = draw(st.lists(st.floats(0, 1), max_size=MAX_DRAFTS))
    guessed = Guessed(draw(st.integers(len(sure), MAX_DRAFTS)), draw(st.booleans()), tuple(sure))
    return Round(proposal, guessed, draw(times), draw(times), right, checked)


@settings(max_examples=60)
@given(st.lists(rounds(), min_size=1, max_size=40))
@example([Round(NOTHING, Guessed(), 0, 0, 0, 0)] * 40)  # a clock that stands still
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
            sure = [0.5, 0.9, 0.2]
            each = [policy.worth(beliefs, source, sure[: count + 1]) for count in range(3)]
            assert policy.worthy(beliefs, source, sure) == [*each, False].index(False)
        policy.worth_guessing(beliefs, [0.5])
        for most in range(MAX_DRAFTS + 1):
            assert 0 <= policy.guesses_at_once(beliefs, most) <= most


def test_a_round_that_gained_may_be_learnt_late():
    """Beside the next guesses: the account then is thought to hold less than it does, and single rows are in time."""
    now = [0]
    drafter = Drafter(3, lambda slot, token, number, best, meanwhile: (meanwhile(), [Likeliest(0, 0.9)] * best)[1],
                      clock=lambda: now[0], chains=True)  # fmt: skip
    drafting, random_, late = drafter.begin(Request("r", (1,), 10**6)), random.Random(3), 0
    for _ in range(400):
        stale = drafter.beliefs
        due = drafting._due
        proposal = drafting.propose(0, 1, 5, 3)
        if due is not None:
            late += 1
            assert drafter.beliefs.spare >= stale.spare
            assert drafter.beliefs.trust["layer"].pause == stale.trust["layer"].pause == 0
            assert drafter.beliefs.since_single < policy.SINGLE_EVERY
            assert drafter.beliefs == learn(stale, due) or not proposal.asked, "the draft layer guessed meanwhile"
        drafting.settle()  # beside the window
        count, right = len(proposal.ids), 0
        now[0] += (100, 105, 110, 115)[count] * MS
        while right < count and random_.random() < 0.7:
            right += 1
        drafting.learn(proposal, right, min(count, right + 1), (100, 105, 110, 115)[count] * MS)
    assert late > 200
    drafting.settle()
    assert drafting._due is None


def test_levels():
    assert [level(x) for x in (-1.0, 0.0, 0.12, 0.13, 0.5, 0.99, 1.0, 2.0)] == [0, 0, 0, 1, 4, 7, 7, 7]
