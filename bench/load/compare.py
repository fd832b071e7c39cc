"""Two reports side by side: paired ratios with intervals, and a refusal where the two did not do the same work.

A pure function of two reports. Pairs are requests with the same key: the same agent, conversation and turn, so the same
text. Not here: reading files. Invariant: comparing a report with itself gives ratios of exactly 1; swapping the two
turns each ratio over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAME = ("format", "scenario", "workload", "workload_digest", "scale", "seed", "concurrency", "seconds", "rate_per_s",
        "rounds", "fixed_length", "walk", "host")  # fmt: skip
MEASURES = ("ttft_s", "gap_s", "end_to_end_s")  # of a request; smaller is better
LEAST_PAIRS = 5
RESAMPLES = 2000


class Unlike(ValueError):
    """The two runs are not comparable; the message says in what they differ."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A: the geometric mean over pairs, and where 95 of 100 resamples of the pairs lie."""

    measure: str
    pairs: int
    ratio: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.low <= 1.0 <= self.high


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Ratio]]:
    """Ratios by part of the run. Raises Unlike when they differ in anything but the server and when it was."""
    different = [f"{key}: {_shown(a, key)} and {_shown(b, key)}" for key in SAME if _shown(a, key) != _shown(b, key)]
    if different:
        raise Unlike("; ".join(different))
    found: dict[str, list[Ratio]] = {}
    for part, run in a["runs"].items():
        other = b["runs"].get(part)
        if other is None:
            raise Unlike(f"part {part!r} is only in the first")
        found[part] = [ratio for measure in MEASURES if (ratio := _paired(run["rows"], other["rows"], measure))]
    if set(b["runs"]) - set(a["runs"]):
        raise Unlike(f"part {min(set(b['runs']) - set(a['runs']))!r} is only in the second")
    if not any(found.values()):
        raise Unlike(f"fewer than {LEAST_PAIRS} requests are in both")
    return found


def _shown(report: Mapping[str, Any], key: str) -> Any:
    if key == "host":
        host = report.get("host") or {}
        return {name: host.get(name) for name in ("cpu", "cpus", "memory_bytes")}
    return (report.get("conditions") or {}).get(key, report.get(key))


def _paired(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], measure: str) -> Ratio | None:
    """None where too few requests are in both, or did not write the same number of tokens."""
    ours = {row["key"]: row for row in a if not row["error"] and row[measure]}
    logs = [
        math.log(row[measure] / ours[row["key"]][measure])
        for row in sorted(b, key=lambda row: str(row["key"]))
        if not row["error"] and row[measure] and row["key"] in ours and ours[row["key"]]["tokens"] == row["tokens"]
    ]
    return ratio_of(logs, measure) if len(logs) >= LEAST_PAIRS else None


def ratio_of(logs: Sequence[float], measure: str) -> Ratio:
    """The mean of these logarithms and its interval, by resampling with a fixed seed."""
    source = random.Random(20260101)  # noqa: S311  the same pairs give the same interval
    count = len(logs)
    means = sorted(math.fsum(source.choices(logs, k=count)) / count for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return Ratio(measure, count, math.exp(math.fsum(logs) / count), math.exp(low), math.exp(high))
