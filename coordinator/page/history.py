"""Counters of the last minute, a sample a second: what rates and curves are made of. Pure.

Not here: when samples are taken (live). Invariant: a rate is never negative, and what was not seen has the rate zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from coordinator import limits

_LEAST_S: Final = 1e-3  # two samples that are closer give no rate


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals that never fall, by lane and name."""

    at_s: float
    totals: Mapping[str, Mapping[str, int]]

    def of(self, lane: str, name: str) -> int:
        """One of them; 0 when it is not there."""
        return self.totals.get(lane, {}).get(name, 0)


class History:
    """The last samples, `limits.PAGE_SAMPLES` at most."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=limits.PAGE_SAMPLES)

    def add(self, sample: Sample) -> None:
        """A newer one."""
        self._samples.append(sample)

    @property
    def samples(self) -> Sequence[Sample]:
        """The oldest first."""
        return tuple(self._samples)


def rate(samples: Sequence[Sample], lane: str, name: str, over_s: float = limits.PAGE_RATE_S) -> float:
    """Per second, over the last `over_s` seconds or what there is of them."""
    if not samples:
        return 0.0
    last = samples[-1]
    first = next(sample for sample in samples if sample.at_s >= last.at_s - over_s)
    return _slope(first, last, lane, name)


def curve(samples: Sequence[Sample], lane: str, name: str) -> list[float]:
    """Per second between each two samples, the oldest first."""
    return [_slope(first, last, lane, name) for first, last in pairwise(samples)]


def share(samples: Sequence[Sample], lane: str, names: Sequence[str]) -> dict[str, float]:
    """How what was counted under these names is divided among them: lately, or in all if nothing was lately."""
    if not samples:
        return dict.fromkeys(names, 0.0)
    last = samples[-1]
    lately = {name: last.of(lane, name) - samples[0].of(lane, name) for name in names}
    counts = lately if any(lately.values()) else {name: last.of(lane, name) for name in names}
    total = sum(counts.values())
    return {name: count / total if total else 0.0 for name, count in counts.items()}


def _slope(first: Sample, last: Sample, lane: str, name: str) -> float:
    seconds = last.at_s - first.at_s
    return max(0, last.of(lane, name) - first.of(lane, name)) / seconds if seconds >= _LEAST_S else 0.0
