"""What drafts bring on a synthetic model of true size, when so many of them are right: the lane, its policy and windows
are real.

An **oracle** proposes what the walk says comes next or, at a given share of places, another token. So "75 %" means an
injected acceptance. A guess costs the oracle its logits and the lane what it makes of them; a draft layer's pass (its
weights, the head and its experts, once a guess) comes on top and is not in these figures. Answers without drafts and
with each share take turns on one stretch, which the cache has seen; a gain is a median of ratios. Not here: the lane's
process and its options (bench.decode_lane), the quality of a draft layer (the demo model's).

Invariant: whatever was injected, the answer is the walk.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.own_lane import Answered, OwnLane
from bench.synthetic.walk import Walk
from lanes.drafts.policy import Beliefs
from lanes.limits import MAX_DRAFTS
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


def measured(
    lane: OwnLane, walk: Walk, start: int, prompt: int, tokens: int, shares: Sequence[float], rounds: int
) -> dict[str, object]:  # fmt: skip
    """Gains by injected share, times of windows by rows; the lane begins with warm caches."""
    drafter = lane.lane.engine.drafter
    beliefs = {share: Beliefs() for share in shares}
    gains: dict[float, list[float]] = {share: [] for share in shares}
    answers: dict[float, list[Answered]] = {share: [] for share in shares}
    alone_ms: list[float] = []
    follows = True
    ids, known = walk.stretch(start, prompt), walk.stretch(start + prompt, tokens)
    drafter.most = 0
    lane.ask(ids, tokens)
    for number in range(rounds):
        for share in (None, *shares):
            drafter.most = 0 if share is None else MAX_DRAFTS
            if share is not None:
                drafter.layer, drafter.beliefs = Oracle(walk, share, number).guess, beliefs[share]
            answer = lane.ask(ids, tokens)
            follows = follows and answer.ids == known
            ms = 1e3 / answer.tokens_per_s
            if share is None:
                alone_ms.append(ms)
            else:
                beliefs[share] = drafter.beliefs
                gains[share].append(alone_ms[-1] / ms)
                answers[share].append(answer)
    best = beliefs[max(shares)]
    return {
        "acceptance": "injected by an oracle, whose guesses cost no pass of a draft layer",
        "rounds": rounds,
        "ms_per_token_without_drafts": round(statistics.median(alone_ms), 3),
        "the_walk_was_answered": follows,
        "window_ms_by_rows": [round(mean.value / 1e6, 3) if mean.count else None for mean in best.windows_ns],
        "windows_over_one_row": [
            round(mean.value / best.windows_ns[0].value, 3) if mean.count else None for mean in best.windows_ns
        ],
        "by_injected_acceptance": {
            f"{share:.0%}": {
                "gain": round(statistics.median(gains[share]), 3),
                "gains": [round(gain, 3) for gain in gains[share]],
                "tokens_per_pass": round(
                    statistics.median((tokens - 1) / a.decode.decode_windows for a in answers[share]), 3
                ),
                "hit_rate": round(
                    statistics.median(
                        a.decode.expert_hits / max(1, a.decode.expert_hits + a.decode.expert_misses)
                        for a in answers[share]
                    ),
                    4,
                ),
                "missed_bytes_per_pass": round(
                    statistics.median(a.decode.expert_miss_bytes / a.decode.decode_windows for a in answers[share])
                ),
            }
            for share in shares
        },
    }
