"""From one row of logits to one token: greedy, or temperature, then top-k, then top-p, then the inverse of the CDF.

Not here: penalties, grammars and drafts. Every tie goes to the lowest id. The CDF runs over the kept ids in ascending
order, so that a last-bit difference in a logit moves a boundary by as little and never reorders it.

Invariant: the draw depends on (logits, sampling, absolute position) only; log-probabilities are those of the raw,
untempered logits. All sums in fp64.

Letters: V vocabulary, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lanes.philox import uniform
from lanes.request import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_TOP_P_FIRST = 256  # candidates sorted at first for top-p; eight times as many each further round


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probability of the chosen token and of the best `top` (id, log-probability) pairs, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def choose(logits: Floats, sampling: Sampling, position: int) -> int:
    """The token for `position`, the place in the sequence that it will take. logits: fp32 [V], all finite."""
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    ids = largest(logits, sampling.top_k) if 0 < sampling.top_k < logits.shape[0] else None
    weights = _weights(logits if ids is None else logits[ids], sampling.temperature)  # [C]
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    cumulative = np.cumsum(weights)
    at = int(np.searchsorted(cumulative, uniform(sampling.seed, position) * cumulative[-1], side="right"))
    if at == weights.shape[0]:  # the product may round up to the total
        at = int(np.flatnonzero(weights)[-1])
    return at if ids is None else int(ids[at])


def logprobs(logits: Floats, chosen: int, top: int) -> Logprobs:
    """Log-softmax of the raw logits at the chosen id and at the `top` best ids."""
    highest = float(logits.max())
    total = highest + float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        ids = largest(logits, top)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return Logprobs(float(logits[chosen]) - total, best)


def largest(values: npt.NDArray[np.floating], count: int) -> Ids:
    """Ids of the `count` greatest values, ascending by id; among equal values the lowest ids."""
    size = values.shape[0]
    if count >= size:
        return np.arange(size)
    least = np.partition(values, size - count)[size - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - above.shape[0]]
    return np.sort(np.concatenate((above, equal)))


def _weights(logits: Floats, temperature: float) -> Doubles:
    """exp((logit - highest) / temperature) in fp64: unnormalised probabilities, the greatest of them 1."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    # A tiny temperature overflows to -inf, whose weight is 0: that is greedy, as it should be.
    with np.errstate(over="ignore", under="ignore"):
        scaled /= temperature
        return np.exp(scaled)


def _nucleus(weights: Doubles, top_p: float) -> Ids:
    """Ascending places of the fewest greatest weights whose share reaches top_p; at least one."""
    goal = top_p * float(np.cumsum(weights)[-1])
    count = _TOP_P_FIRST
    while True:
        places = largest(weights, count)
        order = places[np.argsort(-weights[places], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= goal or count >= weights.shape[0]:
            # One that is reached only after rounding keeps all candidates.
            needed = int(np.searchsorted(cumulative, goal, side="left")) + 1
            return np.sort(order[:needed])
        count *= 8
