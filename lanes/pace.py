"""How long windows and passes take on this lane, measured once at its start on a sequence that is forgotten.

Every size runs once unmeasured, so that kernels are compiled before the first prompt comes. What a pass waited for
copies is taken off, and of windows what their misses take, so what remains is launching and computing.
Not here: what follows (reading), rates of link and products (lanes.experts.gpu.pace).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from lanes import limits
from lanes.counters import Counters
from lanes.reading import WINDOW_ROWS, Pace
from lanes.runner import Runner
from lanes.window import Window

# A pass of fewer rows takes its tokens through DeltaNet one by one, which no longer prompt does; one of fewer than
# many takes as long as its launches do, which says nothing of a row: as many as a chunk has, so that the first chunk
# finds its memory and the library's kernels, too.
FEW_ROWS, MANY_ROWS = 16, limits.MAX_PREFILL_CHUNK_ROWS
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """Of windows of so many rows: medians of the time, the wait for copies, the bytes that missed the cache."""

    rows: int
    seconds: float
    waited_s: float
    missed_bytes: float

    @property
    def busy_s(self) -> float:
        """Without the wait."""
        return max(0.0, self.seconds - self.waited_s)


def timed(
    runner: Runner, counters: Counters, vocab: int, rows: int, repeats: int = REPEATS,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Timed:  # fmt: skip
    """Windows of `rows` rows, as a prompt's are: where decode windows read it all want logits, in a pass none do."""
    logits = "all" if rows <= WINDOW_ROWS else "none"
    seconds, waited, missed = [], [], []
    slot = runner.begin(rows * (1 + repeats))
    try:
        for number in range(1 + repeats):
            start = number * rows
            ids = [(start + n) * 7919 % vocab for n in range(rows)]
            before, began_ns = counters.snapshot(), clock()
            runner.forward(Window.of_sequence(ids, start, slot, logits=logits), lambda: False)
            runner.end_window()  # waits for a pass
            runner.settle()
            if number:
                seconds.append((clock() - began_ns) / 1e9)
                spent = counters.since(before)
                waited.append(spent.stream_wait_ns / 1e9)
                missed.append(spent.expert_miss_bytes)
    finally:
        runner.end(slot)
    median = statistics.median
    return Timed(rows, median(seconds), median(waited), median(missed))


def pace_of(
    window: Timed, few: Timed, many: Timed, *, link_bytes_per_s: float, miss_s: float, expert_row_s: float,
    record_bytes: int,
) -> Pace:  # fmt: skip
    """From a decode window, a pass of few rows and one of many."""
    row_s = max(0.0, many.busy_s - few.busy_s) / max(1, many.rows - few.rows)
    return Pace(
        link_bytes_per_s=link_bytes_per_s,
        miss_s=miss_s,
        window_s=max(0.0, window.seconds - window.missed_bytes / record_bytes * miss_s),
        pass_s=few.busy_s,
        dense_row_s=max(0.0, row_s - expert_row_s),
        expert_row_s=expert_row_s,
    )
