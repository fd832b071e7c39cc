"""Drafts of the model's own draft layer: each guess is the input of the next, for as long as another one is worth it.

At temperature 0 a guess is the layer's likeliest token; else it is drawn from the layer's distribution as the request
asks for it, with the very number of (seed, position) that the model's draw at that place will use. Two distributions
that are alike then give the same token at most places, which a guess drawn by another number would not.
Not here: the layer (models), what a guess is worth (policy), whether it was right (the engine's own draw says).

Invariant: logits that are not finite give no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from lanes.drafts import policy
from lanes.drafts.policy import Beliefs
from lanes.drafts.proposal import Proposal
from lanes.request import Sampling
from lanes.runner import Likeliest, Row
from lanes.sampler import choose

# (token, number of the guess): logits [D], of a greedy request perhaps the greatest alone, or None when it was stopped
Guess = Callable[[int, int], "Row | Likeliest | None"]


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
        found = guess(token, len(ids))
        asked += 1
        if found is None:
            break
        best = found if isinstance(found, Likeliest) else _drawn(found, sampling, position + len(ids))
        if best.place < 0 or not policy.worth(beliefs, "layer", [*sure, best.share]):
            break
        token = best.place if vocabulary is None else int(vocabulary[best.place])
        ids.append(token)
        sure.append(best.share)
    return Proposal("layer", tuple(ids), tuple(sure), asked=asked > 0), asked


def _drawn(row: Row, sampling: Sampling, position: int) -> Likeliest:
    """What the request draws from logits [D], and its probability before any cut."""
    best = Likeliest.of(row)
    if best.place < 0 or sampling.temperature == 0.0:
        return best
    place = choose(row, sampling, position)
    return Likeliest(place, best.share * float(np.exp(row[place] - row[best.place])))
