"""The time-aligned aggregate: how many tokens all lanes wrote in one common stretch of time, per second of it.

A pure function over stamped tokens; no clock, no files, no wire. Not here: driving load (demo, later bench runs).

Definition. Per lane, a *span* is a stretch in which at least `target` of its streams run (drops shorter than the
allowed gap are bridged: a closed loop needs a moment between two requests), begun no earlier than `warm_up_s` after the
lane's first token; the lane's span is its longest one. W is the intersection of all lanes' spans on one monotonic
clock, half open. Aggregate = tokens stamped inside W / |W|. It is never a sum of per-lane averages: those cover
different times. The result is invalid, with reasons, when W is too short, shorter than a share of a lane's busy span,
or when a lane wrote nothing for too long inside W.

Invariant: the result does not depend on the order of lanes, streams or stamps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Stamp:
    """`tokens` tokens chosen at `at_s` (seconds of one monotonic clock of the host)."""

    at_s: float
    tokens: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.at_s):
            raise ValueError(f"stamp at {self.at_s} s is not a finite time")
        if self.tokens < 1:
            raise ValueError(f"a stamp carries at least one token, not {self.tokens}")


@dataclass(frozen=True, slots=True)
class Stream:
    """One request on a lane: running from `begin_s` to `end_s`, with the tokens it wrote."""

    begin_s: float
    end_s: float
    stamps: tuple[Stamp, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.begin_s) and math.isfinite(self.end_s) and self.begin_s <= self.end_s):
            raise ValueError(f"a stream cannot run from {self.begin_s} s to {self.end_s} s")
        if any(not self.begin_s <= s.at_s <= self.end_s for s in self.stamps):
            raise ValueError(f"a token is stamped outside its stream's {self.begin_s} s to {self.end_s} s")


@dataclass(frozen=True, slots=True)
class Rules:
    """What makes a window count (CONTRACTS: 60 s, 10 s in CI; no gap over 1 s; 70 % of each lane's busy span)."""

    target: int = 1
    warm_up_s: float = 0.0
    min_window_s: float = 60.0
    max_gap_s: float = 1.0
    min_busy_share: float = 0.7


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The common window and what all lanes wrote in it; `reasons` is empty exactly when it is valid."""

    begin_s: float
    end_s: float
    tokens: int
    lane_tokens: dict[str, int]
    reasons: tuple[str, ...] = field(default=())

    @property
    def window_s(self) -> float:
        """|W| in seconds."""
        return self.end_s - self.begin_s

    @property
    def valid(self) -> bool:
        """Whether the figure may be quoted."""
        return not self.reasons

    @property
    def tokens_per_s(self) -> float:
        """Tokens inside W per second of W; 0 for an empty window."""
        return self.tokens / self.window_s if self.window_s > 0 else 0.0

    def lane_tokens_per_s(self, lane: str) -> float:
        """That lane's rate in the same window."""
        return self.lane_tokens[lane] / self.window_s if self.window_s > 0 else 0.0


def aligned_aggregate(lanes: Mapping[str, Sequence[Stream]], rules: Rules | None = None) -> Aggregate:
    """The aggregate of all `lanes` under `rules`. Raises ValueError when there is no lane."""
    if not lanes:
        raise ValueError("an aggregate needs at least one lane")
    rules = rules or Rules()
    spans = {name: _longest_span(streams, rules) for name, streams in lanes.items()}
    reasons = [f"{name}: never at {rules.target} running" for name, span in spans.items() if span is None]
    begin = max((span[0] for span in spans.values() if span), default=0.0)
    end = min((span[1] for span in spans.values() if span), default=0.0)
    if reasons or end <= begin:
        reasons = reasons or ["the lanes' spans have no time in common"]
        return Aggregate(begin, begin, 0, dict.fromkeys(lanes, 0), tuple(sorted(reasons)))
    if end - begin < rules.min_window_s:
        reasons.append(f"window of {end - begin:.3f} s is shorter than {rules.min_window_s:g} s")
    lane_tokens = {}
    for name, streams in lanes.items():
        inside = sorted(
            ((s.at_s, s.tokens) for stream in streams for s in stream.stamps if begin <= s.at_s < end),
        )
        lane_tokens[name] = sum(tokens for _, tokens in inside)
        gap = _longest_gap([at for at, _ in inside], begin, end)
        if gap > rules.max_gap_s:
            reasons.append(f"{name}: no token for {gap:.3f} s inside the window")
        busy = max(s.end_s for s in streams) - min(s.begin_s for s in streams)
        if end - begin < rules.min_busy_share * busy:
            reasons.append(f"{name}: window covers less than {rules.min_busy_share:.0%} of its busy {busy:.3f} s")
    return Aggregate(begin, end, sum(lane_tokens.values()), lane_tokens, tuple(sorted(reasons)))


def _longest_span(streams: Sequence[Stream], rules: Rules) -> tuple[float, float] | None:
    """The longest stretch at the target concurrency after warm-up, None when there is none; ties: the earliest."""
    first_token = min((s.at_s for stream in streams for s in stream.stamps), default=math.inf)
    not_before = first_token + rules.warm_up_s
    clipped = [(max(a, not_before), b) for a, b in _at_target(streams, rules) if b > not_before]
    return max(clipped, key=lambda span: (span[1] - span[0], -span[0]), default=None)


def _at_target(streams: Iterable[Stream], rules: Rules) -> list[tuple[float, float]]:
    """Stretches with at least `target` streams running, in time order, drops up to the allowed gap bridged."""
    edges = sorted([(s.begin_s, 1) for s in streams] + [(s.end_s, -1) for s in streams], key=lambda e: (e[0], -e[1]))
    spans: list[tuple[float, float]] = []
    running, since = 0, math.nan
    for at, step in edges:
        running += step
        if step == 1 and running == rules.target:
            since = at
        elif step == -1 and running == rules.target - 1:
            if spans and since - spans[-1][1] <= rules.max_gap_s:
                spans[-1] = (spans[-1][0], at)
            else:
                spans.append((since, at))
    return spans


def _longest_gap(stamps: Sequence[float], begin: float, end: float) -> float:
    """The longest time without a stamp in [begin, end), its edges counting as stamps."""
    points = [begin, *stamps, end]
    return max(b - a for a, b in pairwise(points))
