"""The CPU's share of misses, searched on real windows: a pure rule that tries a little more, then a little less.

Rates measured at start say where to begin; attention, sampling and other processes then take memory and cores that no
such measurement has seen. The share is moved by one number, the CPU's cost as a power of two times the measured one.
A trial interleaves blocks of windows with the present bias and with the next one, in the order A B B A, so that
weather and topics that change hit both alike. Two neighbouring blocks make a pair, and the pairs' differences say how
sure one may be: windows differ by a tenth because their misses do, and what is sought is a few hundredths. A candidate
wins when it is better by WINS times the difference's own error, and by MARGIN; it is given up as soon as it looks
worse, or after PAIRS_MOST. After both directions have lost, the rule rests, longer each time.

Windows of other sizes than the first of a trial are passed over. Not here: clocks, tables of counts
(lanes.experts.split).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

STEP = 0.25  # of the bias: 19 % of the CPU's cost
MOST_BIAS = 4.0
BLOCK = 16  # windows
SKIPPED = 2  # windows of a block: the first ones after a change, which comes one window late
PAIRS_LEAST, PAIRS_MOST = 6, 24
WINS, LOSES = 3.0, 1.0  # errors of the mean difference
MARGIN = 0.005  # of the present's mean
REST, MOST_REST = 4096, 65536  # windows


@dataclass(frozen=True, slots=True)
class Trial:
    """What pairs of blocks have said of a candidate so far."""

    rows: int = 0  # of its windows; 0: none yet
    seen: int = 0  # windows
    present_ns: int = 0  # of the pair that is under way
    candidate_ns: int = 0
    pairs: int = 0
    sum: float = 0.0  # of candidate / present - 1
    squares: float = 0.0

    @property
    def tries(self) -> bool:
        """Whether the next window is the candidate's."""
        return self.seen // BLOCK % 4 in (1, 2)

    def after(self, rows: int, window_ns: int) -> Trial:
        """With one window more."""
        counted = window_ns if self.seen % BLOCK >= SKIPPED else 0
        trial = replace(
            self, rows=rows, seen=self.seen + 1, present_ns=self.present_ns + counted * (not self.tries),
            candidate_ns=self.candidate_ns + counted * self.tries,
        )  # fmt: skip
        if trial.seen % (2 * BLOCK):
            return trial
        off = trial.candidate_ns / max(1, trial.present_ns) - 1
        return replace(
            trial, present_ns=0, candidate_ns=0, pairs=self.pairs + 1, sum=self.sum + off,
            squares=self.squares + off * off,
        )  # fmt: skip

    @property
    def won(self) -> bool | None:
        """Nothing as long as that is not known."""
        if self.pairs < PAIRS_LEAST or self.seen % (2 * BLOCK):
            return None
        mean = self.sum / self.pairs
        error = math.sqrt(max(0.0, self.squares / self.pairs - mean * mean) / (self.pairs - 1))
        if mean < -max(MARGIN, WINS * error):
            return True
        return False if mean > LOSES * error or self.pairs >= PAIRS_MOST else None


@dataclass(frozen=True, slots=True)
class Climb:
    """Where the search stands."""

    bias: float = 0.0  # the best known
    direction: float = STEP
    lost: int = 0  # directions since the last success
    resting: int = 0  # windows left
    rest: int = REST  # the next one
    trial: Trial = Trial()

    @property
    def used(self) -> float:
        """The bias that the next window should have."""
        return self.bias + self.direction * (self.trial.tries and not self.resting)


def after(climb: Climb, rows: int, window_ns: int) -> Climb:
    """What follows a window of `rows` rows that took so long with `climb.used`."""
    if climb.resting:
        return replace(climb, resting=climb.resting - 1)
    if climb.trial.rows and rows != climb.trial.rows:
        return climb
    climb = replace(climb, trial=climb.trial.after(rows, window_ns))
    return climb if climb.trial.won is None else _judged(climb, won=climb.trial.won)


def _judged(climb: Climb, *, won: bool) -> Climb:
    """The next trial, or a rest."""
    if won:
        again = replace(climb, bias=climb.bias + climb.direction, lost=0, rest=REST, trial=Trial())
    else:
        again = replace(climb, direction=-climb.direction, lost=(climb.lost + 1) % 2, trial=Trial())
        if climb.lost:
            again = replace(again, resting=climb.rest, rest=min(MOST_REST, 2 * climb.rest))
    outside = abs(again.bias + again.direction) > MOST_BIAS
    return replace(again, direction=-again.direction) if outside else again
