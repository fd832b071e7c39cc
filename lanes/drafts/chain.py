"""Drafts of the model's own draft layer: each guess is the input of the next, for as long as another one is worth it.

At temperature 0 a guess is the layer's likeliest token; else it is drawn from the layer's distribution as the request
asks for it, with the very number of (seed, position) that the model's draw at that place will use. Two distributions
that are alike then give the same token at most places, which a guess drawn by another number would not.
Not here: the layer (models), what a guess is worth (policy), whether it was right (the engine's own draw says).

Invariant: logits that are not finite give no guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from lanes.drafts import policy
from lanes.drafts.policy import Beliefs
from lanes.drafts.proposal import Proposal
from lanes.request import Sampling
from lanes.runner import Row
from lanes.sampler import choose

Guess = Callable[[int, int], "Row | None"]  # (token, number of the guess): logits [D], or None when it was stopped


class Vocabulary(Protocol):
    """From a place in the draft layer's logits to a token."""

    def __getitem__(self, place: int) -> int: ...


def chain(
    beliefs: Beliefs,
    guess: Guess,
    token: int,
    position: int,
    sampling: Sampling,
    most: int,
    vocabulary: Sequence[int] | None = None,
) -> tuple[Proposal, int]:
    """(proposal, guesses asked for) after `token`; the first draft would stand at `position`."""  # fmt: skip
    ids: list[int] = []
    sure: list[float] = []
    asked = 0
    while len(ids) < most and policy.worth_guessing(beliefs, sure):
        row = guess(token, len(ids))
        asked += 1
        if row is None:
            break
        highest = float(row.max())
        if not math.isfinite(highest):
            break
        place = choose(row, sampling, position + len(ids))
        share = float(np.exp(row[place] - highest) / np.exp(row - highest).sum(dtype=np.float64))
        if not policy.worth(beliefs, "layer", [*sure, share]):
            break
        token = place if vocabulary is None else int(vocabulary[place])
        ids.append(token)
        sure.append(share)
    return Proposal("layer", tuple(ids), tuple(sure), asked=asked > 0), asked
