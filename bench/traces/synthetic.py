"""Frozen synthetic routing traces at the true size: 48 layers x 512 experts, 10 chosen, one row per decode window.

Not here: policies or figures. A trace is a function of its name: integer arithmetic only (a hash of counters instead of
a random generator, weights by integer division), so every machine and every numpy makes the same bytes, and `DIGESTS`
was committed before any policy was tuned on them.

How an expert is drawn: every layer has a popularity (weight 1 / (rank + a) under a permutation of its own), and every
topic has another one. A token draws from their mixture, and in places from what the token before it used.

Letters: L layers, E experts, K chosen, M candidates drawn for K places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LAYERS, EXPERTS, CHOSEN = 48, 512, 10
PREFILL_ROWS = 2048
_CANDIDATES = 40
_WEIGHT = 1 << 32
_KNEE = 96  # ranks above it fall off twice as fast
_PARTS = 256  # a share is so many of 256 parts


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """What one window routed: the distinct keys (layer * EXPERTS + expert), ascending, and the rows of each."""

    rows: int
    keys: Ints  # [D]
    counts: Ints  # [D]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The knobs of a trace; shares are in 256ths."""

    tokens: int
    seed: int
    topics: int = 1
    topic_share: int = 0  # of the draws, from the topic and not from the layer's own popularity
    repeat_share: int = 0  # of the draws, from what the token before used
    shortest_topic: int = 0  # tokens until the topic changes, from ...
    longest_topic: int = 0  # ... to
    return_share: int = 0  # of the changes, back to one of the four topics before
    prefill: int = 0  # chunks of PREFILL_ROWS that open every topic


RECIPES = {
    "stationary": Recipe(tokens=3000, seed=1, repeat_share=90),
    "drifting": Recipe(
        tokens=6000, seed=2, topics=64, topic_share=128, repeat_share=90, shortest_topic=150, longest_topic=500,
        return_share=128,
    ),
    "mixture": Recipe(
        tokens=4000, seed=3, topics=64, topic_share=128, repeat_share=90, shortest_topic=80, longest_topic=300,
        return_share=128, prefill=2,
    ),
    "conversation": Recipe(
        tokens=4000, seed=4, topics=64, topic_share=96, repeat_share=90, shortest_topic=150, longest_topic=500,
        return_share=128,
    ),
}  # fmt: skip

DIGESTS = {
    "stationary": "6e003206b0bb414f2bdf7207c95eadcd8ecc6fefebd16617e6fa8839f781ce25",
    "drifting": "19091e80d4787b1b4b59af3837c39579f45e28db5af237f3f0245404fad5654e",
    "mixture": "a3a790929e0de8f5cca125145b162460b6645c9da4e87609829bbb9f7b471d87",
    "conversation": "a8f3de1ebd8d4c66be8ecb2b3055859780ef6c29db119da8e7baaea404b3a5ee",
}


def trace(name: str) -> Iterator[TraceWindow]:
    """The windows of a frozen trace."""
    recipe = RECIPES[name]
    draw = _Hash(recipe.seed)
    own = _popularity(draw)
    topics = [_popularity(draw) for _ in range(recipe.topics)]
    before: Ints | None = None
    for topic, tokens in _schedule(recipe, draw):
        weights = own * (_PARTS - recipe.topic_share) + topics[topic] * recipe.topic_share  # [L, E]
        for _ in range(recipe.prefill):
            yield _prefill(weights, draw)
        table = _Table(weights)
        for _ in range(tokens):
            candidates = table.candidates(draw)  # [L, M]
            if before is not None and recipe.repeat_share:
                again = draw.below(_PARTS, candidates.shape) < recipe.repeat_share
                place = draw.below(CHOSEN, candidates.shape)
                candidates = np.where(again, np.take_along_axis(before, place, axis=1), candidates)
            before = _first_distinct(candidates)
            keys = (before + np.arange(LAYERS)[:, None] * EXPERTS).reshape(-1)
            yield TraceWindow(1, np.sort(keys), np.ones(LAYERS * CHOSEN, np.int64))


def digest(windows: Iterable[TraceWindow]) -> str:
    """SHA-256 over rows, number of keys, keys and counts of every window, as little-endian 32-bit words."""
    total = hashlib.sha256()
    for window in windows:
        head = np.array([window.rows, len(window.keys)])
        total.update(np.concatenate([head, window.keys, window.counts]).astype("<u4").tobytes())
    return total.hexdigest()


class _Hash:
    """Numbers from a counter, mixed as splitmix64 does."""

    def __init__(self, seed: int) -> None:
        self._at = seed << 40

    def words(self, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
        count = int(np.prod(shape))
        z = (np.arange(self._at, self._at + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        self._at += count
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).reshape(shape)

    def below(self, bound: int | npt.NDArray[np.uint64], shape: tuple[int, ...]) -> Ints:
        return (self.words(shape) % np.asarray(bound, np.uint64)).astype(np.int64)

    def one(self, bound: int) -> int:
        return int(self.below(bound, (1,))[0])


def _popularity(draw: _Hash) -> Ints:
    """Integer weights [L, E] of equal sum per layer (but for rounding): steep in some layers, flatter in others."""
    flatness = 1 + draw.below(6, (LAYERS, 1))
    rank = np.arange(EXPERTS)
    raw = _WEIGHT // ((rank + flatness) * (rank + _KNEE))  # [L, E] by rank
    raw = raw * 4096 // raw.sum(axis=1, keepdims=True)
    ranks = np.argsort(np.argsort(draw.words((LAYERS, EXPERTS)), axis=1, kind="stable"), axis=1, kind="stable")
    weights: Ints = np.maximum(1, np.take_along_axis(raw, ranks, axis=1))
    return weights


class _Table:
    """Draws candidates by weight: one search over all layers side by side."""

    def __init__(self, weights: Ints) -> None:
        sums = weights.cumsum(axis=1)
        self._totals = sums[:, -1:].astype(np.uint64)
        self._shift = np.arange(LAYERS)[:, None] * int(sums[:, -1].max() + 1)
        self._flat = (sums + self._shift).reshape(-1)

    def candidates(self, draw: _Hash) -> Ints:
        wanted = draw.below(self._totals, (LAYERS, _CANDIDATES)) + self._shift
        found: Ints = np.searchsorted(self._flat, wanted, side="right") - np.arange(LAYERS)[:, None] * EXPERTS
        return found


def _first_distinct(candidates: Ints) -> Ints:
    """The first K distinct ids of every row [L, M]; where there are fewer, the lowest unused ids after them."""
    padded = np.concatenate([candidates, np.broadcast_to(np.arange(CHOSEN), (len(candidates), CHOSEN))], axis=1)
    order = np.argsort(padded, axis=1, kind="stable")
    ascending = np.take_along_axis(padded, order, axis=1)
    new = np.ones_like(ascending, dtype=np.bool_)
    new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    first = np.zeros_like(new)
    np.put_along_axis(first, order, new, axis=1)
    place = np.argsort(~first, axis=1, kind="stable")[:, :CHOSEN]
    return np.take_along_axis(padded, place, axis=1)


def _prefill(weights: Ints, draw: _Hash) -> TraceWindow:
    """A chunk of prompt: every expert's expected rows, rounded up or down by chance, at most every row."""
    totals = weights.sum(axis=1, keepdims=True)
    scaled = weights * (PREFILL_ROWS * CHOSEN)
    counts = scaled // totals + (draw.below(totals.astype(np.uint64), weights.shape) < scaled % totals)
    flat = np.minimum(counts, PREFILL_ROWS).reshape(-1)
    keys = np.flatnonzero(flat)
    return TraceWindow(PREFILL_ROWS, keys, flat[keys])


def _schedule(recipe: Recipe, draw: _Hash) -> Iterator[tuple[int, int]]:
    """(topic, tokens) until the tokens are used up: a change goes back to a recent topic or on to any."""
    if recipe.topics == 1:
        yield 0, recipe.tokens
        return
    recent: list[int] = []
    left = recipe.tokens
    while left > 0:
        others = recent[:-1]
        if others and draw.one(_PARTS) < recipe.return_share:
            topic = others[draw.one(len(others))]
        else:
            topic = draw.one(recipe.topics)
        recent = [*(t for t in recent if t != topic), topic][-5:]
        tokens = min(left, recipe.shortest_topic + draw.one(recipe.longest_topic - recipe.shortest_topic + 1))
        yield topic, tokens
        left -= tokens
