"""How fast a lane reads prompts and writes answers, measured from its own counters.

Not here: reading the counters (roster). Pure. Invariants: a rate is positive; a lane that was not measured yet is
taken for the mean of those that were, and with none for `limits.DEFAULT_*`; what a dead process counted says something
about its successor (same device), so a rate survives its lane's death.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator import limits

_NEW_SHARE = 0.3  # of a rate, what the newest measurement is worth
_LEAST_S = 0.02  # of computing before its rate is believed


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

    def look(self, tokens: int, seconds: float) -> None:
        if seconds < self.seconds or tokens < self.tokens:  # another process
            self.tokens, self.seconds = 0, 0.0
        new_tokens, new_s = tokens - self.tokens, seconds - self.seconds
        if new_tokens <= 0 or new_s < _LEAST_S:
            return
        measured = new_tokens / new_s
        self.per_s = measured if self.per_s is None else self.per_s + _NEW_SHARE * (measured - self.per_s)
        self.tokens, self.seconds = tokens, seconds


class LaneRates:
    """Rates of all lanes by name."""

    def __init__(self) -> None:
        self._lanes: dict[str, tuple[_Rate, _Rate]] = {}

    def look(self, lane: str, counted: Counted) -> None:
        """Take over what its process has counted by now."""
        prefill, decode = self._lanes.setdefault(lane, (_Rate(), _Rate()))
        prefill.look(counted.prompt_tokens, counted.prefill_s)
        decode.look(counted.generated_tokens, counted.decode_s)

    @property
    def measured(self) -> bool:
        """Whether any lane has been measured."""
        return any(rate.per_s is not None for pair in self._lanes.values() for rate in pair)

    def forget(self, lane: str) -> None:
        """The lane is no more."""
        self._lanes.pop(lane, None)

    def speed(self, lane: str) -> Speed:
        """Of that lane, or what is to be expected of it."""
        prefill, decode = self._lanes.get(lane, (_Rate(), _Rate()))
        return Speed(
            prefill.per_s or self._mean(0, limits.DEFAULT_PREFILL_TOKENS_PER_S),
            decode.per_s or self._mean(1, limits.DEFAULT_DECODE_TOKENS_PER_S),
        )

    def _mean(self, which: int, default: float) -> float:
        known = [rate for pair in self._lanes.values() if (rate := pair[which].per_s) is not None]
        return sum(known) / len(known) if known else default


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
