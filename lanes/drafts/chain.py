"""Drafts of the model's own draft layer: each guess is the input of the next.

    chain       one guess after the other, for as long as another one is worth it
    at_once     several in one call, where the layer can do that: how many is decided before. What it named is then
                given up from the first guess on that is not worth a row

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
from lanes.drafts.policy import Beliefs, Guessed
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.request import Sampling
from lanes.runner import Likeliest, Row
from lanes.sampler import choose

# (token, number of the guess, or how many at once): logits [D], of a greedy request perhaps the greatest alone, of each
# one at once, or None when it was stopped
Guess = Callable[[int, int], "Row | Sequence[Likeliest] | None"]


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
) -> tuple[Proposal, Guessed]:
    """(proposal, what was asked for) after `token`; the first draft would stand at `position`."""
    ids: list[int] = []
    sure: list[float] = []
    asked = 0
    while len(ids) < most and policy.worth_guessing(beliefs, sure):
        found = guess(token, len(ids))
        asked += 1
        if found is None:
            break
        best = _drawn(found, sampling, position + len(ids)) if isinstance(found, np.ndarray) else found[0]
        if best.place < 0 or not policy.worth(beliefs, "layer", [*sure, best.share]):
            break
        token = best.place if vocabulary is None else int(vocabulary[best.place])
        ids.append(token)
        sure.append(best.share)
    return Proposal("layer", tuple(ids), tuple(sure), asked=asked > 0), Guessed(asked)


def at_once(
    beliefs: Beliefs, guesses: Guess, token: int, most: int, vocabulary: Sequence[int] | None = None
) -> tuple[Proposal, Guessed]:
    """The same of a greedy request, by one call."""
    asked = policy.guesses_at_once(beliefs, most)
    if not asked:
        return NOTHING, Guessed()
    found = guesses(token, asked) or ()
    assert not isinstance(found, np.ndarray), "a layer that makes several at once says which are the greatest"
    named = [each.place >= 0 for each in found]
    count = named.index(False) if False in named else len(named)
    sure = tuple(each.share for each in found[:count])
    kept = policy.worthy(beliefs, "layer", sure)
    ids = tuple(each.place if vocabulary is None else int(vocabulary[each.place]) for each in found[:kept])
    return Proposal("layer", ids, sure[:kept]), Guessed(asked, at_once=True, sure=sure)


def _drawn(row: Row, sampling: Sampling, position: int) -> Likeliest:
    """What the request draws from logits [D], and its probability before any cut."""
    best = Likeliest.of(row)
    if best.place < 0 or sampling.temperature == 0.0:
        return best
    place = choose(row, sampling, position)
    return Likeliest(place, best.share * float(np.exp(row[place] - row[best.place])))
