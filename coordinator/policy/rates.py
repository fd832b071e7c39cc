"""How fast a lane reads prompts and writes answers, measured from its own counters.

A measurement is believed for the seconds it is made of, and less the more others have been measured since: what a lane
did with two short prompts, its cache cold, must not keep work away from it for ever.

Not here: reading the counters (roster). Pure. Invariants: a rate is positive; a lane that was not measured yet is
taken for the mean of those that were, and with none for `limits.DEFAULT_*`; what a dead process counted says something
about its successor (same device), so a rate survives its lane's death.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator import limits

_NEW_SHARE = 0.3  # of a rate, what the newest measurement is worth
_LEAST_S = 0.02  # of computing before its rate is looked at
_OTHERS_S = 1.0  # of computing, at most, that what the other lanes say about a lane counts for
_MOST_S = 10.0  # of computing that is remembered, so that it can fade
_LEAST_WEIGHT = 1e-3
_FADE_S = 20.0  # of computing elsewhere, after which e times less of it is believed


@dataclass(frozen=True, slots=True)
class Counted:
    """What one process of a lane has done since it started."""

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    generated_tokens: int = 0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second."""

    prefill: float
    decode: float


@dataclass(slots=True)
class _Rate:
    tokens: int = 0  # as counted when it was measured last
    seconds: float = 0.0
    per_s: float | None = None
    evidence_s: float = 0.0  # how much computing it is believed for

    @property
    def weight(self) -> float:
        """Never nothing: a rate of long ago is better than a guess when there is no other."""
        return max(self.evidence_s, _LEAST_WEIGHT)

    def look(self, tokens: int, seconds: float) -> float:
        """Seconds that were new."""
        if seconds < self.seconds or tokens < self.tokens:  # another process
            self.tokens, self.seconds = 0, 0.0
        new_tokens, new_s = tokens - self.tokens, seconds - self.seconds
        if new_tokens <= 0 or new_s < _LEAST_S:
            return 0.0
        measured = new_tokens / new_s
        self.per_s = measured if self.per_s is None else self.per_s + _NEW_SHARE * (measured - self.per_s)
        self.tokens, self.seconds = tokens, seconds
        self.evidence_s = min(_MOST_S, self.evidence_s + new_s)
        return new_s


class LaneRates:
    """Rates of all lanes by name."""

    def __init__(self) -> None:
        self._lanes: dict[str, tuple[_Rate, _Rate]] = {}
        self._sums = [(0.0, 0.0), (0.0, 0.0)]  # of weights, and of weights times rates
        self._speeds: dict[str, Speed] = {}  # since the last change

    def look(self, lane: str, counted: Counted) -> None:
        """Take over what its process has counted by now."""
        pair = self._lanes.setdefault(lane, (_Rate(), _Rate()))
        totals = ((counted.prompt_tokens, counted.prefill_s), (counted.generated_tokens, counted.decode_s))
        new_s = [rate.look(*total) for rate, total in zip(pair, totals, strict=True)]
        if not any(new_s):  # as most often: everything stands as it did
            return
        for which, seconds in enumerate(new_s):
            fade = math.exp(-seconds / _FADE_S)
            for name, rates in self._lanes.items():
                if name != lane:
                    rates[which].evidence_s *= fade
        self._sum()

    @property
    def measured(self) -> bool:
        """Whether any lane has been measured."""
        return any(rate.per_s is not None for pair in self._lanes.values() for rate in pair)

    def forget(self, lane: str) -> None:
        """The lane is no more."""
        self._lanes.pop(lane, None)
        self._sum()

    def speed(self, lane: str) -> Speed:
        """Of that lane, or what is to be expected of it."""
        known = self._speeds.get(lane)
        if known is None:
            known = self._speeds[lane] = Speed(
                self._believed(lane, 0, limits.DEFAULT_PREFILL_TOKENS_PER_S),
                self._believed(lane, 1, limits.DEFAULT_DECODE_TOKENS_PER_S),
            )
        return known

    def _believed(self, lane: str, which: int, default: float) -> float:
        weight, weighted = self._sums[which]
        mine = self._lanes[lane][which] if lane in self._lanes else _Rate()
        if mine.per_s is not None:  # what the others say is what remains without this one
            weight, weighted = weight - mine.weight, weighted - mine.weight * mine.per_s
        others = weighted / weight if weight >= _LEAST_WEIGHT / 2 else None  # less is what rounding left
        if mine.per_s is None:
            return default if others is None else others
        if others is None:
            return mine.per_s
        return others + (mine.per_s - others) * mine.weight / (mine.weight + min(_OTHERS_S, weight))

    def _sum(self) -> None:
        """Once after each change: a decision asks for the speeds of all lanes."""
        self._speeds.clear()
        for which in (0, 1):
            known = [
                (rate.weight, rate.per_s) for pair in self._lanes.values() if (rate := pair[which]).per_s is not None
            ]
            self._sums[which] = (
                sum(weight for weight, _ in known),
                sum(weight * (per_s or 0.0) for weight, per_s in known),
            )


class OutputLengths:
    """How long answers are: a moving mean, for requests that say only how long theirs may be."""

    def __init__(self) -> None:
        self._mean = float(limits.DEFAULT_OUTPUT_TOKENS)

    def ended(self, output_tokens: int) -> None:
        """An answer was complete."""
        self._mean += 0.1 * (output_tokens - self._mean)

    def expected(self, max_tokens: int) -> float:
        """Of a request that may have so many."""
        return min(float(max_tokens), max(1.0, self._mean))
