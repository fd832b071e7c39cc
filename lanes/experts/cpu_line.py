"""What a layer's share takes the CPU, from what layers of real windows took: start_us + count * each_us, a pure rule.

A measurement at the lane's start may fall into a bad moment: another lane starts, a neighbour has the memory. So it
only says where to begin; the share's own thread times every layer, and those times decide, the latest ones most. Layers
of few experts weigh more: a line need not hold from one expert to forty. Where the CPU is not asked any more nobody
would learn that it has become faster, so a cost that is not seen is believed to shrink until it is tried again.

An expert is never believed to take less than a part of what it took alone at the start (`least_us`), unless all that
was seen is below that: where nothing misses nothing is seen either, and what a copy costs in misses follows from an
expert's time. For a try it is small enough: what a share takes before its first expert shrinks to nothing.

Not here: what the link takes, and what neither side's time shows (lanes.experts.climb); clocks.
Invariant: neither part of a line is below nothing; at what was seen most the line says what was seen; hoping makes no
part larger.

Letters: P pairs of a window, at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

HALF_LIFE = 32.0  # windows; of some forty layers each that give the CPU something
LEAST = 24.0  # layers, of which a line may be made
HELD = 32.0  # so many layers one expert apart say as much of the slope as the line of before
USUAL = 3  # experts
HOPE = 64.0  # windows without layers, after which half the cost is believed
LEAST_SHARE = 0.5  # starts in a host's bad moment have measured 1.6 times what was right

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Line:
    """So many experts of a layer take start_us + count * each_us."""

    start_us: float
    each_us: float

    def hoped(self, factor: float, least_us: float) -> Line:
        """The same shrunk by it, an expert to no less than that."""
        return Line(factor * self.start_us, min(self.each_us, max(factor * self.each_us, least_us)))

    def times(self, factor: float) -> Line:
        """The same at another pace."""
        return Line(factor * self.start_us, factor * self.each_us)

    def us(self, count: float) -> float:
        """Of a layer with so many experts for the CPU, one or more."""
        return self.start_us + count * self.each_us

    def apart(self, other: Line) -> float:
        """By what part a usual share takes longer or shorter than on the other line."""
        return abs(self.us(USUAL) / max(other.us(USUAL), 1e-9) - 1)


@dataclass(frozen=True, slots=True)
class Seen:
    """The line that is believed, and what it rests on."""

    line: Line
    layers: F64  # [P + 1] of so many experts for the CPU, faded
    us: F64  # [P + 1] all of them together, faded
    least_us: float = 0.0  # of an expert

    @classmethod
    def of(cls, line: Line, most: int, least_us: float = 0.0) -> Seen:
        """Nothing yet, but this line; shares have up to `most` experts."""
        return cls(line, np.zeros(most + 1), np.zeros(most + 1), least_us)


def after(seen: Seen, windows: int, layers: I64, ns: I64) -> Seen:
    """What is believed `windows` windows later, which had so many layers by count of experts [P + 1] in so long."""
    kept = 0.5 ** (windows / HALF_LIFE)
    known = seen.layers * kept + layers
    us = seen.us * kept + ns / 1e3
    if known[1:].sum() < LEAST:
        return replace(seen, line=seen.line.hoped(0.5 ** (windows / HOPE), seen.least_us), layers=known, us=us)
    return replace(seen, line=_through(known, us, seen.line, seen.least_us), layers=known, us=us)


def _through(layers: F64, us: F64, before: Line, least_us: float) -> Line:
    """The line nearest to these times, a layer weighing one part in its count."""
    count = np.arange(1, len(layers), dtype=np.float64)
    weight, time = layers[1:] / count, us[1:] / count
    total = weight.sum()
    mean_count, mean_us = float(weight @ count / total), float(time.sum() / total)
    off = count - mean_count
    each_us = float(time @ off + HELD * before.each_us) / float(weight @ off**2 + HELD)
    each_us = min(max(least_us, each_us), mean_us / mean_count)
    return Line(mean_us - each_us * mean_count, each_us)
