"""What the engine is doing and since when: the figures by which the coordinator tells a slow lane from a stuck one.

    admit ──▶ between ──▶ prefill | decode ──▶ between ──▶ … ──▶ idle
                            │  ▲
                            └──┘ progress, at every layer

Not here: the decision. Who reads `step` and `times` compares the time since the last progress with what that kind of
step usually takes (docs/processes.md, "Watchdogs").

Invariant: written by the engine's thread only. A step that others read is replaced whole, never changed in place; times
are worked out by who asks, not between two steps, and may lack one that just ends. Memory is bounded: one histogram of
BUCKETS counts per kind of step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("prefill", "decode", "between")
LEAST_BITS, MOST_BITS = 16, 40  # 65 microseconds to 18 minutes; outside counts as the nearest
BUCKETS = 2 * (MOST_BITS - LEAST_BITS) + 2
REMEMBERED = 1024  # counts are halved then, so that old steps fade


class Step(NamedTuple):
    """What runs. Times are CLOCK_MONOTONIC of this host."""

    kind: str
    started_ns: int
    progress_ns: int  # its start, or the last layer that was begun


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps of a kind take: at most `p99_ns` in 99 of 100; 0 until one has ended."""

    kind: str
    count: int  # since the lane started
    p99_ns: int


class Durations:
    """A histogram whose buckets are half octaves wide."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.added = 0
        self._held = 0

    def add(self, duration_ns: int) -> None:
        """One more step."""
        self.added += 1
        self.counts[bucket(duration_ns)] += 1
        self._held += 1
        if self._held >= REMEMBERED:
            self.counts = [count // 2 for count in self.counts]
            self._held = sum(self.counts)

    def p99_ns(self) -> int:
        """The upper end of the bucket that the 99th of 100 falls into; 0 while empty."""
        wanted = math.ceil(self._held * 0.99)
        for number, count in enumerate(self.counts):
            wanted -= count
            if wanted <= 0 and count:
                return upper_ns(number)
        return 0


def bucket(duration_ns: int) -> int:
    """The bucket of a duration: its highest bit, and the bit below that."""
    at = min(max(duration_ns, 1 << LEAST_BITS), (1 << MOST_BITS + 1) - 1)
    bits = at.bit_length() - 1
    return 2 * (bits - LEAST_BITS) + (at >> bits - 1 & 1)


def upper_ns(number: int) -> int:
    """The first duration past a bucket."""
    bits, half = divmod(number, 2)
    return (3 + half) << bits + LEAST_BITS - 1


class StepWatch:
    """The engine tells it; anybody may read."""

    def __init__(self) -> None:
        self.step: Step | None = None  # None while idle
        self._durations = {"prefill": Durations(), "decode": Durations()}

    @property
    def times(self) -> tuple[StepTimes, ...]:
        """Of each kind of step."""
        return tuple(StepTimes(kind, one.added, one.p99_ns()) for kind, one in self._durations.items())

    def between(self) -> None:
        """A generation was admitted, or a step is over: something short is done."""
        now = time.monotonic_ns()
        self.step = Step("between", now, now)

    def begin(self, kind: str) -> None:
        """A step of that kind begins."""
        now = time.monotonic_ns()
        self.step = Step(kind, now, now)

    def progress(self) -> None:
        """The step got one layer further."""
        step = self.step
        if step is not None:
            self.step = Step(step.kind, step.started_ns, time.monotonic_ns())

    def done(self) -> None:
        """The step has ended well: its time counts."""
        step = self.step
        assert step is not None, "a step that ends has begun"
        self._durations[step.kind].add(time.monotonic_ns() - step.started_ns)
        self.between()

    def idle(self) -> None:
        """Nothing runs."""
        self.step = None
