"""How many drafts a round may carry: a pure function of what earlier rounds cost and brought. No clock, no model.

A window of T rows costs more than one of one row, and brings 1 token and as many drafts as were right. Both are
measured, never assumed; what is believed of times that nobody has seen of late is in `times`. What the first window of
a size took is what it fetched that nobody had used before, and tells nothing of a proposer:

    worth of a draft     P(it and all before it are right), from how often drafts of its kind were, against
                         λ · (time of T + 1 rows − time of T rows), λ being the tokens per time that the lane reaches
    guesses at once      as many as bring most by that, of what the layer usually is how sure of, after λ · their time
    gain of a try        tokens − time / time of a single row: what the round brought beyond going one by one. A
                         proposer whose tries lose PATIENCE at once, or LOSING each in the long run, pauses, each time
                         twice as long, then is tried again
    the account          every round pays ALLOWED of a single window in, and its gain, losses too; a try that could
                         cost more than the account holds is not made. More drafts than were ever tried could cost
                         UNTRIED times as much as it seems, unless as many as were tried have been right

The account is the promise: whatever drafts do, N rounds take about (1 + ALLOWED) · N + FIRST windows of one row at
worst, as long as times stay what they were measured. Times are by the caller's clock; a stall of the machine counts at
most MOST_GAIN windows.

Invariant: `learn` changes nothing it was given; every number stays finite.

Letters: T rows of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lanes.drafts.proposal import SOURCES, Proposal, Source
from lanes.drafts.times import FAST, UNKNOWN, Mean, hoped, line, looked_at, timed
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS

ALLOWED = 0.02  # windows of one row that a round may cost more, in the long run
FIRST = 2.0  # windows that the account holds when the lane starts
MOST_SPARE = 4.0  # windows that it can hold: earlier profit pays for no long loss
MOST_GAIN = 4.0  # windows that one round counts at most, either way
LEVELS = 8  # kinds of drafts by how sure their proposer was
SINGLES = 3  # windows of one row before the first try
SINGLE_EVERY = 24  # rounds, then one row again: its time is the measure of everything
TRIES = 4  # of a proposer before it is judged
PATIENCE = 1.0  # windows that its last tries may have lost
LOSING = -0.05  # windows of a try in the long run; one that gains a little is below 0 now and then
PAUSE, MOST_PAUSE = 16, 512  # rounds
UNTRIED = 2.5  # the first window of a size takes up to so many times what later ones do
_RARE, _GAIN, _SLOW = 1 / 4, 1 / 16, 1 / 32  # weights of the newest in running means
_DRIFT = 1 / 64  # of what was not tried


@dataclass(frozen=True, slots=True)
class Trust:
    """What is known of one proposer."""

    right: tuple[tuple[float, ...], ...]  # [place of the draft][level]: share of drafts that were right
    gain: Mean = UNKNOWN  # windows of one row, by try
    pause: int = 0  # rounds until it is tried again
    next_pause: int = PAUSE
    seen: tuple[tuple[float, ...], ...] = ((0.0,) * LEVELS,) * MAX_DRAFTS  # guesses at once of late, wanted or not
    most_right: int = 0  # drafts of one round that were all right


PRIOR = tuple((kind + 0.5) / LEVELS for kind in range(LEVELS))  # a proposer is as right as it is sure


def _fresh() -> dict[Source, Trust]:
    return {source: Trust((PRIOR,) * MAX_DRAFTS) for source in SOURCES}


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Everything a lane has learnt about drafts; times in ns."""

    windows_ns: tuple[Mean, ...] = (UNKNOWN,) * MAX_WINDOW_TOKENS  # by T - 1, as measured
    hoped_ns: tuple[float, ...] = (0.0,) * MAX_WINDOW_TOKENS  # by how much each is believed to be shorter by now
    guess_ns: Mean = UNKNOWN  # of one guess of the draft layer, however it was asked for
    calls_ns: tuple[Mean, ...] = (UNKNOWN,) * MAX_DRAFTS  # of so many guesses at once, less 1
    tokens: Mean = UNKNOWN  # of a round
    round_ns: Mean = UNKNOWN
    trust: dict[Source, Trust] = field(default_factory=_fresh)
    spare: float = FIRST  # the account: windows of one row
    since_single: int = 0

    def window_ns(self, rows: int) -> float:
        """Time of a window of that many rows: measured less what is hoped, or along the line from one row through one
        that was."""
        single, known = self.windows_ns[0].value, self.windows_ns[rows - 1]
        if rows == 1:
            return single
        if known.count > 1:  # no row makes a window shorter: where it seems so, the shorter one's time is an old one
            found = known.value - self.hoped_ns[rows - 1]
            for t in range(rows, len(self.windows_ns)):  # faster than a generator: the device waits
                if (longer := self.windows_ns[t]).count > 1:
                    found = min(found, longer.value - self.hoped_ns[t])
            return max(single, found)
        on_line = line(self.windows_ns, rows)  # of a first one's time some was no row's
        return max(single, min(known.value, on_line)) if known.count else on_line

    def draft_ns(self, number: int) -> float:
        """By how much the last of so many drafts makes a window longer."""
        return self.window_ns(1 + number) - self.window_ns(number)

    def guesses_ns(self, count: int, *, at_once: bool) -> float:
        """Time of so many guesses, by one call or one by one."""
        if not at_once:
            return count * self.guess_ns.value
        if (mean := self.calls_ns[count - 1]).count:
            return mean.value
        known = [(abs(n - count), n) for n, mean in enumerate(self.calls_ns, 1) if mean.count]
        if not known:
            return count * self.guess_ns.value
        _, n = min(known)
        return self.calls_ns[n - 1].value * count / n

    def rate(self) -> float:
        """Tokens per ns that the lane reaches, at least one per window of one row."""
        reached = self.tokens.value / self.round_ns.value if self.round_ns.value else 0.0
        return max(reached, 1 / max(self.windows_ns[0].value, 1.0))


@dataclass(frozen=True, slots=True)
class Guessed:
    """What was asked of the draft layer in a round."""

    count: int = 0  # of guesses, kept or not
    at_once: bool = False
    sure: tuple[float, ...] = ()  # of guesses at once: of each that named a token


@dataclass(frozen=True, slots=True)
class Round:
    """What one decode round was: a proposal, perhaps cut short by `worth`, and a window of 1 + its ids rows."""

    proposal: Proposal
    guessed: Guessed
    draft_ns: int
    window_ns: int
    right: int  # drafts that were accepted
    checked: int  # drafts that were compared: the right ones and the first wrong one


def level(sure: float) -> int:
    """The kind of a draft."""
    return min(LEVELS - 1, max(0, int(sure * LEVELS)))


def may_try(beliefs: Beliefs, source: Source, most: int, *, at_once: bool = False) -> int:
    """How many drafts of that proposer this round may carry, 0 to `most`."""
    single, trust = beliefs.windows_ns[0], beliefs.trust[source]
    if single.count < SINGLES or beliefs.since_single >= SINGLE_EVERY or trust.pause > 0:
        return 0
    longest = max(rows for rows, mean in enumerate(beliefs.windows_ns, 1) if mean.count)
    for drafts in range(min(most, longest), 0, -1):  # one row more than was ever measured
        window_ns = beliefs.window_ns(1 + drafts)
        if drafts > 1 + trust.most_right and not beliefs.windows_ns[drafts].count:
            window_ns *= UNTRIED
        guesses_ns = beliefs.guesses_ns(drafts, at_once=at_once) if source == "layer" else 0.0
        cost = (window_ns + guesses_ns) / max(single.value, 1.0) - 1.0
        if cost <= beliefs.spare:
            return drafts
    return 0


def worth(beliefs: Beliefs, source: Source, sure: Sequence[float]) -> bool:
    """Whether the last of these drafts deserves its row, given the ones before it."""
    return _reach(beliefs, source, sure) >= beliefs.rate() * beliefs.draft_ns(len(sure))


def worthy(beliefs: Beliefs, source: Source, sure: Sequence[float]) -> int:
    """How many of these drafts, from the first on, deserve their rows."""
    rate, reach, right = beliefs.rate(), 1.0, beliefs.trust[source].right
    for place, each in enumerate(sure):
        reach *= right[place][level(each)]
        if reach < rate * beliefs.draft_ns(1 + place):
            return place
    return len(sure)


def worth_guessing(beliefs: Beliefs, sure: Sequence[float]) -> bool:
    """Whether to ask the draft layer once more after these; the next guess is taken to be as sure as the last."""
    place, trust = len(sure), beliefs.trust["layer"]
    if place == 0 and trust.gain.count < TRIES:
        return True  # it is being tried, and the account can bear it
    right = trust.right[place]
    more_ns = beliefs.draft_ns(1 + place) + beliefs.guess_ns.value
    next_right = right[level(sure[-1])] if sure else max(right)
    return _reach(beliefs, "layer", sure) * next_right >= beliefs.rate() * more_ns


def guesses_at_once(beliefs: Beliefs, most: int) -> int:
    """How many guesses, 0 to `most`, to ask for before any of them is known."""
    trust, rate = beliefs.trust["layer"], beliefs.rate()
    if trust.gain.count < TRIES:
        return most  # it is being tried, and the account can bear it
    found, best = min(most, int(worth_guessing(beliefs, ()))), 0.0
    brought, kept, reach, seen = 0.0, 1.0, 1.0, (1.0,) * LEVELS
    for place in range(most):
        # Where no guess was ever seen they are taken to be as sure as those before them.
        seen = trust.seen[place] if any(trust.seen[place]) else seen
        cost = rate * beliefs.draft_ns(1 + place)
        wanted, hit = 0.0, 0.0
        for share, right in zip(seen, trust.right[place], strict=True):
            if reach * right >= cost:
                wanted, hit = wanted + share, hit + share * right
        if not wanted:
            break
        wanted, hit = wanted / sum(seen), hit / wanted
        kept, reach = kept * wanted, reach * hit  # that there is a draft at this place, and that all up to it are right
        brought += kept * (reach - cost)
        if (net := brought - rate * beliefs.guesses_ns(place + 1, at_once=True)) > best:
            found, best = place + 1, net
    return found


def _reach(beliefs: Beliefs, source: Source, sure: Sequence[float]) -> float:
    """The probability that all of them are right."""
    share = 1.0
    for place, each in enumerate(sure):
        share *= beliefs.trust[source].right[place][level(each)]
    return share


def may_wait(beliefs: Beliefs, done: Round) -> bool:
    """Whether the next round may be decided before this one is learnt: until then the account is thought to hold no
    more than it does, nobody is asked who would pause, and no single row is due."""
    if not done.proposal.asked:
        return beliefs.since_single < SINGLE_EVERY
    if beliefs.since_single + 1 >= SINGLE_EVERY:
        return False
    return _gain(beliefs.windows_ns[0], done) >= 0.0 and beliefs.trust[done.proposal.source].gain.value >= 0.0


def _gain(single: Mean, done: Round) -> float:
    """Windows of one row that a try has brought."""
    if single.count < SINGLES or not done.proposal.asked:
        return 0.0
    gain = 1 + done.right - (done.draft_ns + done.window_ns) / max(single.value, 1.0)
    return max(-MOST_GAIN, min(MOST_GAIN, gain))


def learn(beliefs: Beliefs, done: Round) -> Beliefs:
    """After a round."""
    proposal, rows = done.proposal, 1 + len(done.proposal.ids)
    tokens, spent_ns = 1 + done.right, done.draft_ns + done.window_ns
    windows = list(beliefs.windows_ns)
    # Between drafts single rows are rare: each one counts for more, so that a machine that gets faster is noticed.
    weight = _RARE if rows == 1 and beliefs.since_single else FAST
    first = rows > 1 and not windows[rows - 1].count
    before = looked_at(windows[rows - 1], beliefs.hoped_ns[rows - 1], done.window_ns)
    windows[rows - 1] = timed(before, done.window_ns, weight, settles=rows > 1)
    known, gain = windows[0].count >= SINGLES, _gain(windows[0], done)
    trust = {
        source: replace(each, pause=each.pause - 1) if each.pause else each for source, each in beliefs.trust.items()
    }
    if proposal.asked:
        trust[proposal.source] = _judged(trust[proposal.source], done, None if first else gain)
    guess_ns, calls_ns, guessed = beliefs.guess_ns, beliefs.calls_ns, done.guessed
    if guessed.count:
        guess_ns = timed(guess_ns, done.draft_ns // guessed.count, settles=True)
    if guessed.count and guessed.at_once:
        at = guessed.count - 1
        calls_ns = (*calls_ns[:at], timed(calls_ns[at], done.draft_ns, settles=True), *calls_ns[at + 1 :])
    return Beliefs(
        windows_ns=tuple(windows),
        hoped_ns=hoped(windows, beliefs.hoped_ns, rows),
        guess_ns=guess_ns,
        calls_ns=calls_ns,
        tokens=beliefs.tokens.with_value(tokens, _SLOW),
        round_ns=timed(beliefs.round_ns, spent_ns, _SLOW),
        trust=trust,
        spare=min(MOST_SPARE, beliefs.spare + (ALLOWED if known else 0.0) + gain),
        since_single=0 if rows == 1 else beliefs.since_single + 1,
    )


def _judged(trust: Trust, done: Round, gain: float | None) -> Trust:
    """A proposer after a try; without a gain its time says nothing."""
    right, seen = list(trust.right), list(trust.seen)
    for place, sure in enumerate(done.guessed.sure):
        faded = [each * (1 - _SLOW) for each in seen[place]]
        faded[level(sure)] += 1.0
        seen[place] = tuple(faded)
    all_right = len(done.proposal.ids) if done.right == len(done.proposal.ids) else 0
    most_right = max(trust.most_right, all_right)
    for place in range(done.checked):
        kind, hit = level(done.proposal.sure[place]), float(place < done.right)
        row = list(right[place])
        row[kind] += (hit - row[kind]) * _SLOW * (4 if trust.gain.count < 32 else 1)
        right[place] = tuple(row)
    # Nobody looks at a place that is thought not to be worth it: slowly it is taken to be as the one before, and tried.
    for place in range(max(1, len(done.proposal.ids)), MAX_DRAFTS):
        before = right[place - 1]
        right[place] = tuple(mine + (its - mine) * _DRIFT for mine, its in zip(right[place], before, strict=True))
    mean = trust.gain if gain is None else trust.gain.with_value(gain, _GAIN)
    losing = mean.value * min(mean.count, 2 * TRIES) < -PATIENCE or (mean.count >= 4 * TRIES and mean.value < LOSING)
    if mean.count >= TRIES and losing:
        # What comes after the pause may be another kind of text: half of what was learnt is forgotten.
        eased = tuple(tuple((a + b) / 2 for a, b in zip(row, PRIOR, strict=True)) for row in right)
        next_pause = min(MOST_PAUSE, 2 * trust.next_pause)
        return Trust(eased, UNKNOWN, trust.next_pause, next_pause, tuple(seen), most_right)
    next_pause = PAUSE if mean.count > 4 * TRIES else trust.next_pause
    return Trust(tuple(right), mean, 0, next_pause, tuple(seen), most_right)
