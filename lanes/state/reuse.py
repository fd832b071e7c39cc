"""What of a prompt is known, and where checkpoints go. Pure: numbers and token ids in, numbers out.

Invariant: two sequences share a prefix only as far as their tokens are equal, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Part:
    """Prompt tokens start..end-1 are one window; a checkpoint follows where `mark`."""

    start: int
    end: int
    mark: bool


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens are equal from the beginning on."""
    shorter = min(a.shape[0], b.shape[0])
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if differ.shape[0] else shorter


def parts(start: int, end: int, chunk_rows: int, marks: Iterable[int]) -> list[Part]:
    """Tokens start..end-1 in windows of at most `chunk_rows` that end at every mark; `end` is one."""
    ends = sorted({mark for mark in marks if start < mark < end} | {end})
    out: list[Part] = []
    for stop in ends:
        while start < stop:
            until = min(start + chunk_rows, stop)
            out.append(Part(start, until, until == stop))
            start = until
    return out


def marks(prompt_tokens: int, hints: Sequence[int], every: int, gap: int) -> list[int]:
    """Positions inside a prompt where its state is kept: the hints, and every `every` tokens where no hint is near.

    Each one costs a window's start, so of hints less than `gap` apart the later one counts, but the first is kept.
    """
    chosen: list[int] = []
    for hint in sorted({hint for hint in hints if 0 < hint < prompt_tokens}):
        if len(chosen) > 1 and hint - chosen[-1] < gap:
            chosen[-1] = hint
        else:
            chosen.append(hint)
    regular = range(every, prompt_tokens, every)
    near = [r for r in regular if all(abs(r - hint) >= every // 4 for hint in chosen)]
    return sorted({*chosen, *near})


def least_missed(positions: Sequence[int]) -> int:
    """Which of these checkpoints costs the fewest tokens to read again when it is gone."""
    before = dict(zip(positions, (0, *positions), strict=False))
    return min(positions, key=lambda position: (position - before[position], position))


def most_useful(positions: Iterable[int], most: int) -> list[int]:
    """At most that many of these, ascending: the last one, and those whose loss would cost the most tokens."""
    kept = sorted(positions)
    while len(kept) > max(1, most):
        kept.remove(least_missed(kept[:-1]))
    return kept
