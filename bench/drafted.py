"""What drafts bring on a synthetic model of true size, when so many of them are right: the lane, its policy, windows
and passes of the draft layer are real.

An **oracle** asks the draft layer, whose weights are random, and answers in its place what the walk says comes next or,
at a given share of places, another token. So "75 %" means an injected acceptance; a gain has the passes' time in it,
and of the oracle's a look-up: its dice are thrown before an answer. It is equally sure of all its drafts, so that the
policy has nothing to choose by; "graded", it is as sure of each draft as drafts like it are right (beta-distributed
around the share).
Windows of each size are seen where all drafts are right and nobody is asked; answers without drafts and with each share
take turns on one stretch, on a set of experts that is held. The share named first has all of its rounds before the
others begin.

    gain               time without drafts over time with them, of all rounds; also of all `after_first`, the round in
                       which the lane has yet to learn what drafts cost and bring. `gains`: of each round
    right_of_checked   what the dice really gave: of guesses up to the first wrong one of a round

Not here: the lane's process and its options (bench.decode_lane), the quality of a draft layer (the demo model's).

Invariant: whatever was injected, the answer is the walk.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.own_lane import Answered, OwnLane
from bench.synthetic.walk import Walk
from lanes.counters import Counters
from lanes.drafts.drafter import LayerGuess
from lanes.drafts.policy import LEVELS, MOST_SPARE, Beliefs
from lanes.drafts.times import Mean
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS
from lanes.runner import Likeliest
from lanes.window import Meanwhile, nothing

Say = Callable[[str, object], None]
NOBODY = Likeliest(-1, 0.0)


def thrown(
    walk: Walk, tokens: Sequence[int], share: float, seed: int, *, graded: bool = False
) -> dict[int, Likeliest]:  # fmt: skip
    """What an oracle says after each of these tokens, of which that share is right, to a token; which ones, the seed
    says.

    `graded`: it knows how sure it may be of each, and that share is right on average.
    """
    dice, every = np.random.default_rng(seed), len(tokens)
    sure = dice.beta(2 * share + 1e-3, 2 * (1 - share) + 1e-3, every) if graded else np.full(every, share)
    right = dice.random(every) < sure if graded else dice.permutation(every) < round(share * every)
    next_ = walk.successor[np.asarray(tokens)]
    named = np.where(right, next_, walk.successor[next_])
    return {
        token: Likeliest(place, level if graded else 1.0)
        for token, place, level in zip(tokens, named.tolist(), sure.tolist(), strict=True)
    }


@dataclass
class Oracle:
    """Answers in a draft layer's place, by what was thrown."""

    layer: LayerGuess | None  # is asked all the same; None: nobody is
    said: Mapping[int, Likeliest]  # by the token before
    asked: list[tuple[int, int]] = field(default_factory=list)  # the token before, and how many guesses

    def guess(
        self, slot: int, token: int, number: int, best: int, meanwhile: Meanwhile = nothing
    ) -> list[Likeliest] | None:
        """As `Runner.guess`, of greedy requests."""
        found = [NOBODY] * best if self.layer is None else self.layer(slot, token, number, best, meanwhile)
        if found is None:
            return None
        count = 1 if isinstance(found, np.ndarray) else len(found)
        if number == 0:
            self.asked.append((token, count))
        else:  # one by one
            self.asked[-1] = self.asked[-1][0], number + count
        return self._chain(token, count)

    def _chain(self, token: int, count: int) -> list[Likeliest]:
        said: list[Likeliest] = []
        for _ in range(count):
            said.append(self.said[token])
            token = said[-1].place
        return said

    def right_and_checked(self, walk: Walk) -> tuple[int, int]:
        """Of each round's guesses, up to the first wrong one."""
        right = checked = 0
        for token, count in self.asked:
            for each in self._chain(token, count):
                checked += 1
                if each.place != int(walk.successor[token]):
                    break
                right, token = right + 1, each.place
        return right, checked


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the walk, answered again and again; `layer` is the lane's own."""

    lane: OwnLane
    layer: LayerGuess | None
    walk: Walk
    start: int
    prompt: int
    tokens: int
    record_bytes: int

    def answer(
        self, most: int, share: float, beliefs: Beliefs, seed: int = 0, *, asks: bool = True, graded: bool = False
    ) -> tuple[Answered, Beliefs, Oracle]:
        """With at most `most` drafts a round, right at that share; what was learnt, and who guessed."""
        drafter, layer = self.lane.lane.engine.drafter, self.layer if asks else None
        # From the prompt's last token on; a wrong guess goes on from one place further than a right one.
        reached = self.walk.stretch(self.start + self.prompt - 1, self.tokens + 2 * MAX_DRAFTS + 1)
        oracle = Oracle(layer, thrown(self.walk, reached, share, seed, graded=graded))
        drafter.most, drafter.layer, drafter.beliefs = most, oracle.guess, beliefs
        drafter.vocabulary = None  # the oracle names tokens
        answered = self.lane.ask(self.walk.stretch(self.start, self.prompt), self.tokens)
        assert answered.ids == self.walk.stretch(self.start + self.prompt, self.tokens), "the answer is the walk"
        return answered, drafter.beliefs, oracle


@dataclass
class Tally:
    """Of answers with one injected share and at most so many drafts a round."""

    share: float
    most: int = MAX_DRAFTS
    graded: bool = False
    beliefs: Beliefs = field(default_factory=Beliefs)
    alone: list[Answered] = field(default_factory=list)  # each beside the one with drafts
    answers: list[Answered] = field(default_factory=list)
    right: int = 0
    checked: int = 0

    def round(self, stretch: Stretch, seed: int) -> None:
        """An answer without drafts, then one with them, by another throw of the dice each time."""
        alone, _, _ = stretch.answer(0, 1.0, Beliefs())
        answer, self.beliefs, oracle = stretch.answer(self.most, self.share, self.beliefs, seed, graded=self.graded)
        self.alone.append(alone)
        self.answers.append(answer)
        right, checked = oracle.right_and_checked(stretch.walk)
        self.right, self.checked = self.right + right, self.checked + checked

    def figures(self) -> dict[str, object]:
        """Of all rounds so far."""
        gains = [_gain([alone], [answer]) for alone, answer in zip(self.alone, self.answers, strict=True)]
        steps_ns = [ns for answer in self.answers for ns in answer.steps_ns]
        lookups = [answer.decode for answer in self.answers]
        return {
            "gain": _gain(self.alone, self.answers), "gain_after_first": _gain(self.alone[1:], self.answers[1:]),
            "gains": gains, "tokens_per_s": round(len(steps_ns) / (sum(steps_ns) / 1e9), 1),
            "tokens_per_pass": round(_tokens_per_pass(*self.answers), 3),
            "right_of_checked": round(self.right / self.checked, 3) if self.checked else None,
            "guess_ms": round(self.beliefs.guess_ns.value / 1e6, 3),
            "window_ms_by_rows": [round(mean.value / 1e6, 2) for mean in self.beliefs.windows_ns],
            "hit_rate": round(_hit_rate(*lookups), 4),
        }  # fmt: skip


def measured(
    stretch: Stretch, shares: Sequence[float], rounds: int, say: Say, left_s: Callable[[], float]
) -> dict[str, object]:
    """Windows of each size, and gains by injected share and, of the first one, by the most drafts; caches are warm.

    What `left_s` has no time for is left out.
    """
    sizes: list[dict[str, float]] = []
    longest_s = 0.0
    for rows in range(1, MAX_WINDOW_TOKENS + 1):
        if left_s() < 2 * longest_s:
            break
        began_s = time.monotonic()
        sizes.append(_size(stretch, rows))
        longest_s = max(longest_s, time.monotonic() - began_s)
        say(f"windows of {rows}", sizes[-1])
    first = f"{shares[0]:.0%}"
    tallies = {first: Tally(shares[0]), f"{first} on average, graded": Tally(shares[0], graded=True)}
    tallies |= {f"{share:.0%}": Tally(share) for share in shares[1:]}
    fewer = {f"{first}, at most {most}": Tally(shares[0], most) for most in range(1, MAX_DRAFTS)}
    everyone = tallies | fewer
    order = [(number, first) for number in range(rounds)]
    order += [(number, name) for number in range(rounds) for name in everyone if name != first]
    for number, name in order:
        if left_s() < 2 * longest_s:  # two answers, and some more
            break
        everyone[name].round(stretch, number)
        say(
            f"round {number}, {name}",
            {"alone_ms": _ms_per_token(everyone[name].alone[-1:]), **everyone[name].figures()},
        )
    asked = "whose guesses cost no pass" if stretch.layer is None else "after the draft layer was asked"
    return {
        "acceptance": f"injected by an oracle, {asked}", "rounds": rounds,
        "ms_per_token_without_drafts": _ms_per_token([each for tally in everyone.values() for each in tally.alone]),
        "by_rows": sizes,
        "by_injected_acceptance": {name: tally.figures() for name, tally in tallies.items() if tally.answers},
        "by_most_drafts": {name: tally.figures() for name, tally in fewer.items() if tally.answers},
    }  # fmt: skip


def _size(stretch: Stretch, rows: int) -> dict[str, float]:
    """Windows of so many rows, all of them right; now and then a round has fewer, which `rows` tells."""
    answer, _, _ = stretch.answer(rows - 1, 1.0, certain(), asks=False)
    counted, windows = answer.experts, max(1, answer.experts.decode_windows)
    missed, hit = counted.expert_miss_bytes, counted.expert_hit_bytes
    # A window's tokens are drawn one right behind the other: the longest gaps are those of windows.
    gaps_ns = sorted(answer.steps_ns, reverse=True)[: answer.decode.decode_windows]
    return {
        "rows": round(_tokens_per_pass(answer), 2),
        "window_ms": round(statistics.median(gaps_ns) / 1e6, 3),
        "distinct_experts": round((missed + hit) / windows / stretch.record_bytes, 1),
        "distinct_misses": round(missed / windows / stretch.record_bytes, 1),
        "of_them_the_cpus": round(counted.expert_cpu_bytes / windows / stretch.record_bytes, 1),
        "hit_rate": round(_hit_rate(counted), 4),
    }


class Fixed(Mean):
    """A value that nothing moves."""

    __slots__ = ()

    def moved(self, value: float, weight: float) -> Mean:
        """Itself."""
        return self


def certain() -> Beliefs:
    """What a lane believes that has found drafts to be free and always right, and cannot be told otherwise."""
    always = 1 << 30
    long, nothing = Fixed(1e15, always), Fixed(1.0, always)
    beliefs = Beliefs(
        windows_ns=(long,) * MAX_WINDOW_TOKENS, guess_ns=nothing, calls_ns=(nothing,) * MAX_DRAFTS, tokens=nothing,
        round_ns=long, spare=MOST_SPARE,
    )  # fmt: skip
    trust = {
        source: replace(each, right=((1.0,) * LEVELS,) * MAX_DRAFTS, gain=nothing, most_right=MAX_DRAFTS)
        for source, each in beliefs.trust.items()
    }
    return replace(beliefs, trust=trust)


def _ns(answers: Sequence[Answered]) -> int:
    return sum(sum(answer.steps_ns) for answer in answers)


def _gain(alone: Sequence[Answered], answers: Sequence[Answered]) -> float | None:
    """Of answers of the same tokens."""
    return round(_ns(alone) / _ns(answers), 3) if answers else None


def _ms_per_token(answers: Sequence[Answered]) -> float | None:
    return round(statistics.median(1e3 / answer.tokens_per_s for answer in answers), 3) if answers else None


def _tokens_per_pass(*answers: Answered) -> float:
    passes = sum(answer.decode.decode_windows for answer in answers)
    return sum(len(answer.ids) - 1 for answer in answers) / passes


def _hit_rate(*counted: Counters) -> float:
    hits = sum(each.expert_hits for each in counted)
    return hits / max(1, hits + sum(each.expert_misses for each in counted))
