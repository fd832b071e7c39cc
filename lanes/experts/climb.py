"""The CPU's share of misses, searched on real windows: a pure rule that tries a little more, then a little less.

Rates measured at start say where to begin; attention, sampling and other processes then take memory and cores that no
such measurement has seen. The share is moved by one number, the CPU's cost as a power of two times the measured one.
A trial interleaves blocks of windows with the present bias and with the next one, so that a change of weather hits both
alike, and the candidate wins when its mean is lower by MARGIN. After both directions have lost, the rule rests.

Windows of other sizes than the first of a trial are passed over. Not here: clocks, tables of counts
(lanes.experts.split).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STEP = 0.25  # of the bias: 19 % of the CPU's cost
MOST_BIAS = 4.0
BLOCK = 16  # windows
BLOCKS = 8  # of a trial, half of them of the candidate
SKIPPED = 2  # windows of a block: the first ones after a change
MARGIN = 0.005  # of the mean
REST = 4096  # windows


@dataclass(frozen=True, slots=True)
class Climb:
    """Where the search stands."""

    bias: float = 0.0  # the best known
    direction: float = STEP
    lost: int = 0  # directions since the last success
    resting: int = 0  # windows left
    rows: int = 0  # of the trial's windows; 0: none yet
    seen: int = 0  # windows of the trial
    present_ns: int = 0
    candidate_ns: int = 0

    @property
    def used(self) -> float:
        """The bias that the next window should have."""
        if self.resting or not self.seen // BLOCK % 2:
            return self.bias
        return self.bias + self.direction


def after(climb: Climb, rows: int, window_ns: int) -> Climb:
    """What follows a window of `rows` rows that took so long with `climb.used`."""
    if climb.resting:
        return replace(climb, resting=climb.resting - 1)
    if climb.rows and rows != climb.rows:
        return climb
    at, block = climb.seen % BLOCK, climb.seen // BLOCK
    counted = window_ns if at >= SKIPPED else 0
    climb = replace(
        climb, rows=rows, seen=climb.seen + 1,
        present_ns=climb.present_ns + (counted if block % 2 == 0 else 0),
        candidate_ns=climb.candidate_ns + (counted if block % 2 else 0),
    )  # fmt: skip
    return climb if climb.seen < BLOCK * BLOCKS else _judged(climb)


def _judged(climb: Climb) -> Climb:
    """The next trial, or a rest."""
    again = replace(climb, rows=0, seen=0, present_ns=0, candidate_ns=0)
    candidate = climb.bias + climb.direction
    if climb.candidate_ns < climb.present_ns * (1 - MARGIN):
        again = replace(again, bias=candidate, lost=0)
    else:
        lost = climb.lost + 1
        again = replace(again, direction=-climb.direction, lost=lost % 2, resting=REST if lost == 2 else 0)
    outside = abs(again.bias + again.direction) > MOST_BIAS
    return replace(again, direction=-again.direction) if outside else again
