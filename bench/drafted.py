"""What drafts bring on a synthetic model of true size, when so many of them are right: the lane, its policy and windows
are real.

An **oracle** proposes what the walk says comes next or, at a given share of places, another token. So "75 %" means an
injected acceptance. A guess costs the oracle its logits and the lane what it makes of them; a draft layer's pass (its
weights, the head and its experts, once a guess) comes on top and is not in these figures. Windows of each size are seen
where all drafts are right; answers without drafts and with each share take turns on one stretch, which the cache has
seen; a gain is a median of ratios. One lane does it twice: under the lanes' policy on as many slots as a budget gives
(`Bounded`), then with a set of experts that is held. Not here: the lane's process and its options (bench.decode_lane),
the quality of a draft layer (the demo model's).

Invariant: whatever was injected, the answer is the walk.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.own_lane import Answered, OwnLane
from bench.synthetic.walk import Walk
from lanes.counters import Counters
from lanes.drafts.policy import Beliefs
from lanes.experts.adaptive import adaptive
from lanes.experts.policy import Budget, Plan, Policy, State, Touched
from lanes.limits import MAX_DRAFTS, MAX_WINDOW_TOKENS
from lanes.runner import Row

SURE = 20.0  # a logit that leaves the others nothing


@dataclass
class Oracle:
    """A draft layer in place of one: of a share of tokens it knows what follows."""

    walk: Walk
    share: float
    seed: int

    def guess(self, slot: int, token: int, number: int) -> Row | None:
        """As `Runner.guess`."""
        row = np.zeros(len(self.walk.successor), np.float32)
        right = np.random.default_rng((self.seed, token)).random() < self.share
        next_ = int(self.walk.successor[token])
        row[next_ if right else int(self.walk.successor[next_])] = SURE
        return row


class Bounded:
    """The lanes' policy on fewer slots than the lane has."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def __call__(self, state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        """As `adaptive`."""
        return adaptive(state, touched, replace(budget, slots=min(self._slots, budget.slots)))


class Phases:
    """A policy that is another one from some window on."""

    def __init__(self, now: Policy) -> None:
        self.now = now

    def __call__(self, state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        """What `now` does."""
        return self.now(state, touched, budget)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of the walk, answered again and again."""

    lane: OwnLane
    walk: Walk
    start: int
    prompt: int
    tokens: int
    record_bytes: int

    def answer(self, most: int, share: float, beliefs: Beliefs, seed: int = 0) -> tuple[Answered, Beliefs]:
        """With at most `most` drafts a round, right at that share; and what was learnt."""
        drafter = self.lane.lane.engine.drafter
        drafter.most, drafter.layer, drafter.beliefs = most, Oracle(self.walk, share, seed).guess, beliefs
        answered = self.lane.ask(self.walk.stretch(self.start, self.prompt), self.tokens)
        assert answered.ids == self.walk.stretch(self.start + self.prompt, self.tokens), "the answer is the walk"
        return answered, drafter.beliefs


def measured(stretch: Stretch, shares: Sequence[float], rounds: int) -> dict[str, object]:
    """Windows of each size, and gains by injected share; the lane begins with warm caches."""
    stretch.answer(0, 1.0, Beliefs())
    sizes = [_size(stretch, rows) for rows in range(1, MAX_WINDOW_TOKENS + 1)]
    beliefs = {share: Beliefs() for share in shares}
    gains: dict[float, list[float]] = {share: [] for share in shares}
    answers: dict[float, list[Answered]] = {share: [] for share in shares}
    alone_ms: list[float] = []
    for number in range(rounds):
        alone, _ = stretch.answer(0, 1.0, Beliefs())
        alone_ms.append(1e3 / alone.tokens_per_s)
        for share in shares:
            answer, beliefs[share] = stretch.answer(MAX_DRAFTS, share, beliefs[share], number)
            gains[share].append(alone_ms[-1] * answer.tokens_per_s / 1e3)
            answers[share].append(answer)
    return {
        "acceptance": "injected by an oracle, whose guesses cost no pass of a draft layer",
        "rounds": rounds, "ms_per_token_without_drafts": round(statistics.median(alone_ms), 3), "by_rows": sizes,
        "by_injected_acceptance": {
            f"{share:.0%}": {
                "gain": round(statistics.median(gains[share]), 3), "gains": [round(gain, 3) for gain in gains[share]],
                "tokens_per_pass": round(statistics.median(map(_tokens_per_pass, answers[share])), 3),
                "hit_rate": round(statistics.median(_hit_rate(answer.decode) for answer in answers[share]), 4),
            }
            for share in shares
        },
    }  # fmt: skip


def _size(stretch: Stretch, rows: int) -> dict[str, float]:
    """Windows of so many rows, all of them right; now and then a round has fewer, which `rows` tells."""
    answer, beliefs = stretch.answer(rows - 1, 1.0, Beliefs())
    counted, windows = answer.decode, answer.decode.decode_windows
    learnt = beliefs.windows_ns[rows - 1]
    missed, hit = counted.expert_miss_bytes, counted.expert_hit_bytes
    return {
        "rows": round(_tokens_per_pass(answer), 2),
        # The drafter's running mean where there are drafts: of windows of just this size.
        "window_ms": round((learnt.value if rows > 1 else statistics.median(answer.steps_ns)) / 1e6, 3),
        "distinct_experts": round((missed + hit) / windows / stretch.record_bytes, 1),
        "distinct_misses": round(missed / windows / stretch.record_bytes, 1),
        "of_them_the_cpus": round(counted.expert_cpu_bytes / windows / stretch.record_bytes, 1),
        "hit_rate": round(_hit_rate(counted), 4),
    }


def _tokens_per_pass(answer: Answered) -> float:
    return (len(answer.ids) - 1) / answer.decode.decode_windows


def _hit_rate(counted: Counters) -> float:
    return counted.expert_hits / max(1, counted.expert_hits + counted.expert_misses)
