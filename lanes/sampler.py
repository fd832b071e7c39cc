"""From one row of logits to one token: greedy, or temperature, then top-k, then top-p, then min-p, then a draw.

Not here: penalties and bias, which have changed the row before (penalties); grammars and drafts. Every tie goes to the
lowest id. A draw is the inverse of the CDF over the kept ids in ascending order, so that a last-bit difference in a
logit moves a boundary by as little and never reorders it.

Nothing sorts the vocabulary: what is kept is looked for among the few logits that can be in it. Where all logits count
(the mass that top-p is a share of, a draw without any cut) their weights are fp32, 1e-6 of each at worst, and sums
fp64; among candidates weights are fp64 too.

Invariants: the draw depends on (row, sampling, absolute position) only; at least one token is kept; a logit of -inf is
never drawn; log-probabilities are those of the raw, untempered logits.

Letters: R rows, V vocabulary, C candidates, B blocks or chunks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

import numpy as np
import numpy.typing as npt

from lanes.philox import uniform
from lanes.request import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_BLOCK = 512  # ids
_CHUNK = 16_384  # ids whose weights are made at a time: in cache, and nothing of a megabyte is mapped
_LOOSE = 1.0 - 1e-4  # where candidates are looked for: rounding loses none of them
_MANY = 4096  # candidates of top-p from which on they are not sorted as a whole
_LOWEST = float(np.finfo(np.float32).min)
_FIRST_SHARE = 1e-3  # of the mass: the least weight among top-p's first candidates; a 64th of it each further round


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probability of the chosen token and of the best `top` (id, log-probability) pairs, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def choose(row: Floats, sampling: Sampling, position: int) -> int:
    """The token for `position`, the place in the sequence that it will take. row: fp32 [V], at least one finite."""
    if sampling.temperature == 0.0:
        return int(np.argmax(row))
    at = uniform(sampling.seed, position)
    highest, temperature = float(row.max()), sampling.temperature
    total: float | None = None  # of the candidates' weights, unless more than they count
    if 0 < sampling.top_k < row.shape[0]:
        ids = largest(row, sampling.top_k)
    elif sampling.top_p < 1.0:
        total = float(_masses(row, highest, temperature).sum())
        ids = _nucleus_candidates(row, highest, sampling, total)
    elif sampling.min_p > 0.0:
        ids = _at_least(row, highest, temperature, sampling.min_p * _LOOSE)
    else:
        return _draw_any(row, highest, temperature, at)
    weights = _weights(row[ids], highest, temperature)  # [C]
    if sampling.top_p < 1.0:
        kept = _nucleus(row[ids], weights, sampling.top_p * (float(weights.sum()) if total is None else total))
        ids, weights = ids[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)  # the greatest weight is 1
        ids, weights = ids[kept], weights[kept]
    return int(ids[_draw(weights, at)])


def greedy(logits: Floats) -> Ids:
    """What `choose` takes from each row at temperature 0, int64 [R] of fp32 [R, V]; -1 where a logit is not finite."""
    return np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1)


def logprobs(logits: Floats, chosen: int, top: int) -> Logprobs:
    """Log-softmax of the raw logits at the chosen id and at the `top` best ids."""
    highest = float(logits.max())
    total = highest + log(float(_masses(logits, highest, 1.0).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        ids = largest(logits, top)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return Logprobs(float(logits[chosen]) - total, best)


def largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` greatest values, ascending by id; among equal values the lowest ids."""
    size = values.shape[0]
    if count >= size:
        return np.arange(size)
    ids: Ids | None = None
    blocks = -(-size // _BLOCK)
    if count < blocks // 2:
        # `count` blocks have a value of at least this, so the `count` greatest values have it too.
        maxima = np.maximum.reduceat(values, np.arange(0, size, _BLOCK))  # [B]
        ids = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
        values = values[ids]
    least = np.partition(values, values.shape[0] - count)[values.shape[0] - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - above.shape[0]]
    found = np.sort(np.concatenate((above, equal)))
    return found if ids is None else ids[found]


def _weights(logits: Floats, highest: float, temperature: float) -> Doubles:
    """exp((logit - highest) / temperature): unnormalised probabilities, the greatest of the row 1."""
    # A tiny temperature overflows to -inf, whose weight is 0: that is greedy, as it should be.
    with np.errstate(over="ignore", under="ignore"):
        return np.exp((logits.astype(np.float64) - highest) / temperature)


def _fast_weights(logits: Floats, highest: float, temperature: float) -> Floats:
    """The same in fp32."""
    with np.errstate(over="ignore", under="ignore"):
        scaled = logits - np.float32(highest)
        scaled /= np.float32(temperature)
        np.exp(scaled, out=scaled)
    return scaled


def _masses(row: Floats, highest: float, temperature: float) -> Doubles:
    """The sum of weights of each chunk of the row: [B]."""
    starts = range(0, row.shape[0], _CHUNK)
    return np.array([_fast_weights(row[at : at + _CHUNK], highest, temperature).sum(dtype=np.float64) for at in starts])


def _at_least(row: Floats, highest: float, temperature: float, weight: float) -> Ids:
    """Ids of the logits that have at least that weight, ascending."""
    least = np.float32(max(highest + temperature * log(weight), _LOWEST))
    return np.flatnonzero(row >= np.nextafter(least, -np.float32(np.inf)))


def _nucleus_candidates(row: Floats, highest: float, sampling: Sampling, total: float) -> Ids:
    """Ids that surely hold the nucleus, ascending. `total` is the mass of the row."""
    least = total * _FIRST_SHARE
    while least * row.shape[0] > (1.0 - sampling.top_p) * total * _LOOSE:
        # All ids of at least some weight are a beginning of the order; one that holds enough holds the nucleus.
        ids = _at_least(row, highest, sampling.temperature, min(1.0, least))
        mass = float(_fast_weights(row[ids], highest, sampling.temperature).sum(dtype=np.float64))
        if mass * _LOOSE >= sampling.top_p * total:
            return ids
        least /= 64
    return _at_least(row, highest, sampling.temperature, min(1.0, least))


def _nucleus(logits: Floats, weights: Doubles, goal: float) -> Ids:
    """Ascending places of the fewest greatest weights that sum to `goal`; at least one."""
    keep = np.zeros(logits.shape[0], np.bool_)
    edge = np.arange(logits.shape[0])
    if edge.shape[0] > _MANY:
        # By logit into bins, the greatest first: only the bin in which the goal is reached needs its order.
        below = float(logits.max()) - logits.astype(np.float64)
        bins = (below * ((_MANY - 1) / max(float(below.max()), 1e-30))).astype(np.int64)
        mass: Doubles = np.cumsum(np.bincount(bins, weights, _MANY), dtype=np.float64)
        reached = _first_over(mass, goal, "left")
        keep = bins < reached
        edge = np.flatnonzero(bins == reached)
        goal -= mass[reached - 1] if reached else 0.0
    order = edge[np.argsort(-logits[edge], kind="stable")]
    # A goal that is reached only after rounding keeps all candidates.
    needed = int(np.searchsorted(np.cumsum(weights[order]), goal, side="left")) + 1
    keep[order[:needed]] = True
    return np.flatnonzero(keep)


def _draw_any(row: Floats, highest: float, temperature: float, at: float) -> int:
    """Which id holds the share `at` of all mass: its chunk first."""
    chunks = np.cumsum(_masses(row, highest, temperature))  # [B]
    goal = at * chunks[-1]
    chunk = _first_over(chunks, goal)
    weights = _fast_weights(row[chunk * _CHUNK : (chunk + 1) * _CHUNK], highest, temperature)
    inside = np.cumsum(weights, dtype=np.float64)
    return chunk * _CHUNK + _first_over(inside, goal - (chunks[chunk - 1] if chunk else 0.0))


def _draw(weights: Doubles, at: float) -> int:
    """Which place holds the share `at` of the mass."""
    cumulative = np.cumsum(weights)
    return _first_over(cumulative, at * cumulative[-1])


def _first_over(cumulative: Doubles, goal: float, side: Literal["left", "right"] = "right") -> int:
    """The first place whose sum is over `goal` (left: reaches it); if rounding has none, the last with any weight."""
    place = int(np.searchsorted(cumulative, goal, side=side))
    return place if place < cumulative.shape[0] else int(np.searchsorted(cumulative, cumulative[-1], side="left"))
