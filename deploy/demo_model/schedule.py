"""How far training is, and what follows from it: learning rate, length of sequences. Pure.

Progress counts trained seconds (or steps), so a fixed stretch of a machine's time is used whole: warm-up, a constant
rate, then a straight line to nearly nothing; the last part trains on long sequences over what the indexer selects.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """What a step looks like."""

    sequences: int
    tokens: int  # of a sequence
    sparse: bool  # attention over the indexer's selection
    chained: int  # sequences that draft several steps


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole training."""

    rate: float  # highest learning rate
    seconds: float | None  # of training, or
    steps: int | None
    main: Phase
    finish: Phase
    warm_up_steps: int = 150
    decay_from: float = 0.55  # share of the whole
    finish_from: float = 0.85
    least: float = 0.02  # of the highest rate

    def progress(self, seconds: float, steps: int) -> float:
        """0 at the start, 1 at the end."""
        done = seconds / self.seconds if self.seconds else 0.0
        return max(done, steps / self.steps if self.steps else 0.0)

    def rate_at(self, progress: float, steps: int) -> float:
        """The learning rate of the next step."""
        left = (1 - progress) / (1 - self.decay_from)
        return self.rate * min(1.0, (steps + 1) / self.warm_up_steps) * min(1.0, max(self.least, left))

    def phase_at(self, progress: float) -> Phase:
        """What the next step looks like."""
        return self.finish if progress >= self.finish_from else self.main
