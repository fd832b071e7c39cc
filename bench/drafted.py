"""What drafts bring on a synthetic model of true size, when so many of them are right: the lane, its policy, windows
and passes of the draft layer are real.

An **oracle** asks the draft layer, whose weights are random, and answers in its place what the walk says comes next or,
at a given share of places, another token. So "75 %" means an injected acceptance; a gain has the passes' time in it. It
is equally sure of all its drafts, so that the policy has nothing to choose by; "graded", it is as sure of each draft as
drafts like it are right (beta-distributed around the share).
Windows of each size are seen where all drafts are right and nobody is asked; answers without drafts and with each share
take turns on one stretch, on a set of experts that is held; a gain is a median of ratios. Not here: the lane's process
and its options (bench.decode_lane), the quality of a draft layer (the demo model's).

Invariant: whatever was injected, the answer is the walk.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.own_lane import Answered, OwnLane
from bench.synthetic.walk import Walk
from lanes.counters import Counters
from lanes.drafts.drafter import LayerGuess
from lanes.drafts.policy import LEVELS, MOST_SPARE, Beliefs, Mean
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS
from lanes.runner import Likeliest

Say = Callable[[str, object], None]
NOBODY = Likeliest(-1, 0.0)


@dataclass
class Oracle:
    """Answers in a draft layer's place: of a share of tokens it knows what follows."""

    layer: LayerGuess | None  # is asked all the same; None: nobody is
    walk: Walk
    share: float
    seed: int
    graded: bool = False  # it knows how sure it may be of each

    def guess(self, slot: int, token: int, number: int, best: int) -> list[Likeliest] | None:
        """As `Runner.guess`, of greedy requests."""
        found = self.layer(slot, token, number, best) if self.layer is not None else [NOBODY] * best
        if found is None:
            return None
        said: list[Likeliest] = []
        for _ in range(1 if isinstance(found, np.ndarray) else len(found)):
            said.append(self._after(said[-1].place if said else token))
        return said

    def _after(self, token: int) -> Likeliest:
        random, next_ = np.random.default_rng((self.seed, token)), int(self.walk.successor[token])
        sure = random.beta(2 * self.share + 1e-3, 2 * (1 - self.share) + 1e-3) if self.graded else self.share
        right = random.random() < sure
        return Likeliest(next_ if right else int(self.walk.successor[next_]), sure if self.graded else 1.0)


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
    ) -> tuple[Answered, Beliefs]:
        """With at most `most` drafts a round, right at that share; and what was learnt."""
        drafter, layer = self.lane.lane.engine.drafter, self.layer if asks else None
        oracle = Oracle(layer, self.walk, share, seed, graded)
        drafter.most, drafter.layer, drafter.beliefs = most, oracle.guess, beliefs
        drafter.vocabulary = None  # the oracle names tokens
        answered = self.lane.ask(self.walk.stretch(self.start, self.prompt), self.tokens)
        assert answered.ids == self.walk.stretch(self.start + self.prompt, self.tokens), "the answer is the walk"
        return answered, drafter.beliefs


@dataclass
class Tally:
    """Of answers with one injected share and at most so many drafts a round."""

    share: float
    most: int = MAX_DRAFTS
    graded: bool = False
    beliefs: Beliefs = field(default_factory=Beliefs)
    gains: list[float] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """Medians."""
        return {
            "gain": round(statistics.median(self.gains), 3), "gains": [round(gain, 3) for gain in self.gains],
            "tokens_per_s": round(statistics.median(answer.tokens_per_s for answer in self.answers), 1),
            "tokens_per_pass": round(statistics.median(map(_tokens_per_pass, self.answers)), 3),
            "guess_ms": round(self.beliefs.guess_ns.value / 1e6, 3),
            "window_ms_by_rows": [round(mean.value / 1e6, 2) for mean in self.beliefs.windows_ns],
            "hit_rate": round(statistics.median(_hit_rate(answer.decode) for answer in self.answers), 4),
        }  # fmt: skip


def measured(stretch: Stretch, shares: Sequence[float], rounds: int, say: Say) -> dict[str, object]:
    """Windows of each size, and gains by injected share and, of the first one, by the most drafts; caches are warm."""
    sizes = []
    for rows in range(1, MAX_WINDOW_TOKENS + 1):
        sizes.append(_size(stretch, rows))
        say(f"windows of {rows}", sizes[-1])
    tallies = {f"{share:.0%}": Tally(share) for share in shares}
    first = f"{shares[0]:.0%}"
    tallies = {first: tallies.pop(first), f"{first} on average, graded": Tally(shares[0], graded=True), **tallies}
    fewer = {f"{first}, at most {most}": Tally(shares[0], most) for most in range(1, MAX_DRAFTS)}
    alone_ms: list[float] = []
    for number in range(rounds):
        for name, tally in (tallies | fewer).items():
            alone, _ = stretch.answer(0, 1.0, Beliefs())
            answer, tally.beliefs = stretch.answer(
                tally.most, tally.share, tally.beliefs, number, graded=tally.graded
            )  # fmt: skip
            alone_ms.append(1e3 / alone.tokens_per_s)
            tally.gains.append(answer.tokens_per_s / alone.tokens_per_s)
            tally.answers.append(answer)
            say(f"round {number}, {name}", {"alone_ms": round(alone_ms[-1], 3), **tally.figures()})
    asked = "whose guesses cost no pass" if stretch.layer is None else "after the draft layer was asked"
    return {
        "acceptance": f"injected by an oracle, {asked}", "rounds": rounds,
        "ms_per_token_without_drafts": round(statistics.median(alone_ms), 3), "by_rows": sizes,
        "by_injected_acceptance": {name: tally.figures() for name, tally in tallies.items()},
        "by_most_drafts": {name: tally.figures() for name, tally in fewer.items()},
    }  # fmt: skip


def _size(stretch: Stretch, rows: int) -> dict[str, float]:
    """Windows of so many rows, all of them right; now and then a round has fewer, which `rows` tells."""
    answer, _ = stretch.answer(rows - 1, 1.0, certain(), asks=False)
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

    def with_value(self, value: float, weight: float) -> Mean:
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


def _tokens_per_pass(answer: Answered) -> float:
    return (len(answer.ids) - 1) / answer.decode.decode_windows


def _hit_rate(counted: Counters) -> float:
    return counted.expert_hits / max(1, counted.expert_hits + counted.expert_misses)
