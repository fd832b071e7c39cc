"""What a missing expert takes the link, from how far apart a window's layers began: a pure rule.

A layer's experts are there when both sides have theirs, so from its doorbell to the next one it takes

    rest of the layer + max(what the CPU took, k * link_us)          k experts left to the link

The CPU's thread sees the doorbells and its own time, the rest is the layer's own and known by nobody. But it is always
the same: of the right link_us what is left of a layer's intervals differs least from window to window. So candidates
an eighth of an octave apart are all held against the last windows, which fade, and the one that leaves least is
believed. Where that says nothing, because the CPU was always the later one, the belief shrinks, as a cost does that
nobody sees (cpu_line), until the link is tried again.

It is never less than the link was seen to take with nothing beside it: where the weights of what comes next are on
their way while experts are waited for, a longer wait makes the rest of a layer shorter, and a candidate too small
explains that as well.

Not here: clocks, what the CPU takes (cpu_line), what follows from both (split).
Invariant: layers are compared with themselves only, and only in windows of as many rows.

Letters: L layers, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

HALF_LIFE = 32.0  # windows
HOPE = 64.0  # windows, after which half the cost is believed, where nothing else is known
HELD = 64.0  # times the noise: what an octave between a candidate and the belief weighs
LEAST = 6.0  # windows of as many rows
LATE = 8  # a layer that took so many times the middle one was held up by something else

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

CANDIDATES: F64 = 4.0 * 2.0 ** (np.arange(73) / 8)  # 4 us to 2 ms


@dataclass(frozen=True, slots=True)
class Layers:
    """What was seen of windows of as many rows, faded."""

    windows: F64  # [L]
    left_us: F64  # [L, C] intervals less what a candidate explains
    squares: F64  # [L, C] of them


@dataclass(frozen=True, slots=True)
class Known:
    """The cost that is believed, and what it rests on, by rows of a window."""

    link_us: float
    least_us: float
    of_rows: dict[int, Layers]

    @classmethod
    def of(cls, link_us: float, least_us: float = 0.0) -> Known:
        """Nothing yet, but this cost, and that it is never less than that."""
        return cls(max(link_us, least_us), least_us, {})


def after(known: Known, rows: int, layer_us: F64, cpu_us: F64, experts: I64) -> Known:
    """With one window more of `rows` rows: of its layers [L] how long from their doorbell to the next one, what the CPU
    took, and how many experts were the link's."""
    before = known.of_rows.get(rows)
    if before is None or len(before.windows) != len(layer_us):
        count = len(layer_us)
        before = Layers(np.zeros(count), np.zeros((count, len(CANDIDATES))), np.zeros((count, len(CANDIDATES))))
    # Of a layer without misses the launches themselves are what takes longest.
    counts = ((cpu_us > 0) | (experts > 0)) & (layer_us < LATE * np.median(layer_us))
    left = (layer_us[:, None] - np.maximum(cpu_us[:, None], experts[:, None] * CANDIDATES)) * counts[:, None]
    kept = 0.5 ** (1 / HALF_LIFE)
    seen = Layers(before.windows * kept + counts, before.left_us * kept + left, before.squares * kept + left * left)
    return replace(known, of_rows={**known.of_rows, rows: seen})


def judged(known: Known, windows: int) -> Known:
    """What is believed now, so many windows after the last judgement."""
    hoped = max(known.least_us, known.link_us * 0.5 ** (windows / HOPE))
    unlike, free = np.zeros(len(CANDIDATES)), 0.0
    for seen in known.of_rows.values():
        there = seen.windows >= LEAST
        mean = seen.left_us[there] / seen.windows[there, None]
        unlike += (seen.squares[there] - mean * seen.left_us[there]).sum(axis=0)
        free += float((seen.windows[there] - 1).sum())
    if not free:
        return known
    noise = max(float(unlike.min()) / free, 1e-3)
    cost = unlike / noise + HELD * np.log2(CANDIDATES / max(hoped, CANDIDATES[0])) ** 2
    return replace(known, link_us=max(known.least_us, _lowest(cost)))


def _lowest(cost: F64) -> float:
    """Between the candidates, by the parabola through the best one and its neighbours."""
    best = int(cost.argmin())
    if not 0 < best < len(cost) - 1:
        return float(CANDIDATES[best])
    low, middle, high = cost[best - 1 : best + 2]
    off = 0.5 * (low - high) / max(low - 2 * middle + high, 1e-9)
    return float(CANDIDATES[best] * 2.0 ** (off / 8))
