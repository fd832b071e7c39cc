"""What is believed of times: of windows by their rows, and of guesses. A pure function of times seen; no clock.

A size of window of which enough times are known takes what was measured. Two things may be wrong with that. Its first
times were long, as they fetched what nobody had used: of the first SETTLING the shortest counts. Or it has become
shorter, and nobody looks, since it is thought too long to be worth it: so while others are taken it is hoped, more with
every round, to lie on the line through them. One time that is longer than was hoped ends the hope; of what was measured
nothing is lost, so that a size that is truly long is taken once in a while, not in every tenth round.

Not here: what drafts are worth by these times (policy).

Letters: T rows of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GUESSED_SLOPE = 0.5  # of a single window's time for each further row, until it was measured
SETTLING = 4  # times of a size, or of a guess, of which the shortest counts
MOST_STALL, MOST_LONGER = 4.0, 1.5  # times its mean that a time counts at most: of one row, of what takes turns with it
FAST = 1 / 8  # weight of the newest
HOPE = 1 / 64  # of the way to the line, a round


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean; the first values count alike."""

    value: float = 0.0
    count: int = 0

    def with_value(self, value: float, weight: float) -> Mean:
        """One more."""
        return self.moved(value, max(weight, 1 / (self.count + 1)))

    def moved(self, value: float, weight: float) -> Mean:
        """One more, of that weight however few there were."""
        return Mean(self.value + (value - self.value) * weight, self.count + 1)


UNKNOWN = Mean()


def timed(mean: Mean, sample_ns: float, weight: float = FAST, *, settles: bool = False) -> Mean:
    """With one time more: a stall of the machine moves the mean no further than MOST_STALL times its value. `settles`:
    first times may be long; a shorter one takes their place, and a longer one counts little."""
    if not mean.count:
        return Mean(float(sample_ns), 1)
    if not settles:
        return mean.with_value(min(sample_ns, MOST_STALL * mean.value), weight)
    if mean.count < SETTLING and sample_ns < mean.value:
        return mean.moved(sample_ns, 1.0)
    return mean.moved(min(sample_ns, MOST_LONGER * mean.value), weight)


def line(windows_ns: Sequence[Mean], rows: int) -> float:
    """The time of so many rows by that of others: of the longest shorter window, else of the shortest longer one."""
    single = windows_ns[0].value
    others = [t for t, mean in enumerate(windows_ns[1:], 2) if mean.count > 1 and t != rows]
    slope = GUESSED_SLOPE * single
    if others:
        nearest = max((t for t in others if t < rows), default=min(others))
        slope = max(0.0, windows_ns[nearest - 1].value - single) / (nearest - 1)
    return single + slope * (rows - 1)


def hoped(windows_ns: Sequence[Mean], before_ns: Sequence[float], rows: int) -> tuple[float, ...]:
    """By how much windows of 1, 2, … T rows are hoped to be shorter than was measured, after one of `rows`."""
    found = [0.0] * len(windows_ns)
    for t, (mean, shorter_ns) in enumerate(zip(windows_ns, before_ns, strict=True), 1):
        if 1 < t != rows and mean.count > 1:
            found[t - 1] = shorter_ns + max(0.0, mean.value - shorter_ns - line(windows_ns, t)) * HOPE
    return tuple(found)


def looked_at(mean: Mean, hoped_ns: float, sample_ns: float) -> Mean:
    """The mean to which such a time is to be added: lower by what was hoped, where that has come true or where nobody
    can tell, as the times before may all have been first ones."""
    shorter_ns = mean.value - hoped_ns
    if hoped_ns and (mean.count < SETTLING or sample_ns < shorter_ns):
        return Mean(shorter_ns, mean.count)
    return mean
