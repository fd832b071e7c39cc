"""From replies to figures: pure functions, no clock, no wire.

Invariants: percentiles are of single requests or tokens, never means of means; tokens a second of several lanes are the
time-aligned aggregate (bench.aligned), never a sum; a figure without data is None, not zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.aligned import Aggregate, Rules, Stream, aligned_aggregate
from bench.load.door import Reply

PERCENTILES = (50, 90, 95, 99)
SLICE_S = 1.0


@dataclass(frozen=True, slots=True)
class Goals:
    """A request is good when its first token came in time and 95 % of its gaps were short enough."""

    ttft_s: float
    gap_s: float


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank: a value that was really seen. None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count and percentiles."""
    return {"count": len(values), **{f"p{p}": percentile(values, p) for p in PERCENTILES}}


def good(reply: Reply, goals: Goals) -> bool:
    """Whether it met the goals; an error never does."""
    if reply.error is not None or reply.ttft_s is None or reply.ttft_s > goals.ttft_s:
        return False
    slow = percentile(reply.gaps_s, 95)
    return slow is None or slow <= goals.gap_s


def figures(
    replies: Sequence[Reply], rules: Rules, goals: Goals, seconds: float, *, alone: bool = False
) -> dict[str, Any]:
    """All of one run that lasted `seconds`; `alone`: of one agent."""
    done = [reply for reply in replies if reply.error is None]
    firsts = [reply.ttft_s for reply in done if reply.ttft_s is not None]
    return {
        "requests": len(replies),
        "errors": dict(sorted(Counter(reply.error for reply in replies if reply.error is not None).items())),
        "aggregate": aggregate(replies, rules, alone=alone),
        "ttft_s": spread(firsts),
        "gap_s": spread([gap for reply in done for gap in reply.gaps_s]),
        "end_to_end_s": spread([reply.end_s - reply.begin_s for reply in done]),
        "prompt_tokens_per_s": spread(
            [(reply.prompt_tokens - reply.cached_tokens) / reply.ttft_s for reply in done if reply.ttft_s]
        ),
        "answer_tokens_per_s": spread([1 / mean for reply in done if (mean := _mean(reply.gaps_s))]),
        "tokens": {
            "prompt": sum(reply.prompt_tokens for reply in done),
            "cached": sum(reply.cached_tokens for reply in done),
            "answer": sum(reply.tokens for reply in replies),
        },
        "goodput": {
            "ttft_s": goals.ttft_s,
            "gap_s": goals.gap_s,
            "share": sum(good(reply, goals) for reply in replies) / len(replies) if replies else None,
            "requests_per_s": sum(good(reply, goals) for reply in replies) / seconds,
        },
        "experts": experts(done),
    }


def aggregate(replies: Sequence[Reply], rules: Rules, *, alone: bool = False) -> dict[str, Any] | None:
    """The time-aligned aggregate, and the slices of its window; None when nothing came back.

    `alone`: of one agent, whose requests may meet one lane after the other: lanes have no time in common then.
    """
    lanes = by_lane(replies)
    if not lanes:
        return None
    every = {"the agent": [stream for streams in lanes.values() for stream in streams]}
    total = aligned_aggregate(every if alone else lanes, rules)
    rates = slices(lanes, total.begin_s, total.end_s)
    mean = _mean(rates)
    return {
        "valid": total.valid,
        "reasons": list(total.reasons),
        "window_s": total.window_s,
        "tokens": total.tokens,
        "tokens_per_s": total.tokens_per_s,
        "lanes": {lane: _rate(lanes[lane], total) for lane in sorted(lanes)},
        "window_begins_s": total.begin_s - min(reply.begin_s for reply in replies),
        "slices_tokens_per_s": rates,
        "variation": math.sqrt(sum((r - mean) ** 2 for r in rates) / len(rates)) / mean if mean else None,
    }


def _rate(streams: Sequence[Stream], window: Aggregate) -> float:
    stamps = (stamp for stream in streams for stamp in stream.stamps)
    inside = sum(stamp.tokens for stamp in stamps if window.begin_s <= stamp.at_s < window.end_s)
    return inside / window.window_s if window.window_s > 0 else 0.0


def by_lane(replies: Sequence[Reply]) -> dict[str, list[Stream]]:
    """The streams that wrote something, by the lane that wrote."""
    lanes: dict[str, list[Stream]] = {}
    for reply in replies:
        if reply.pieces:
            lanes.setdefault(reply.lane, []).append(reply.stream)
    return lanes


def slices(lanes: Mapping[str, Sequence[Stream]], begin_s: float, end_s: float) -> list[float]:
    """Tokens a second of all lanes in each whole slice of the window."""
    count = int((end_s - begin_s) / SLICE_S)
    sums = [0] * count
    for streams in lanes.values():
        for stream in streams:
            for stamp in stream.stamps:
                place = math.floor((stamp.at_s - begin_s) / SLICE_S)
                if 0 <= place < count:
                    sums[place] += stamp.tokens
    return [tokens / SLICE_S for tokens in sums]


def experts(replies: Sequence[Reply]) -> dict[str, Any] | None:
    """Hits, and bytes by source, where the server counts them."""
    total: Counter[str] = Counter()
    for reply in replies:
        total.update(reply.counters)
    routed = total["expert_hits"] + total["expert_misses"]
    if not routed:
        return None
    drafted = sum(total[f"drafts_at_{place}"] for place in (1, 2, 3))
    right = sum(total[f"drafts_right_at_{place}"] for place in (1, 2, 3))
    return {
        "hit_rate": total["expert_hits"] / routed,
        "cache_bytes": total["expert_hit_bytes"],
        "region_bytes": total["expert_miss_bytes"],
        "draft_acceptance": right / drafted if drafted else None,
    }


def rows(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """One per request, for `compare` and for plots; times from the first request's begin."""
    zero = min((reply.begin_s for reply in replies), default=0.0)
    return [
        {
            "key": reply.key, "lane": reply.lane, "begin_s": round(reply.begin_s - zero, 4),
            "ttft_s": reply.ttft_s, "end_to_end_s": reply.end_s - reply.begin_s, "gap_s": _mean(reply.gaps_s),
            "prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens, "tokens": reply.tokens,
            "error": reply.error,
            "arrivals_s": [[round(at - zero, 4), tokens] for at, tokens in reply.pieces],
        }
        for reply in replies
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
