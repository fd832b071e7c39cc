"""Traces of requests (`serve --trace-requests DIR`) as the time-aligned aggregate wants them: what real traffic got.

    python -m bench.request_trace DIR|FILE… [--target N] [--warm-up S] [--min-window S] [--json]

Not here: writing them (the coordinator). A request that lost its lane is one stream on each lane that it had.
Invariants: lines are read one at a time and bounded; a line that is no trace is refused with its place, except a last
one that was cut off while it was written; a request with more tokens than stamps is refused for the aggregate, as it
would look like a gap.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.aligned import Rules, Stamp, Stream, aligned_aggregate

LINE_BYTES = 4 << 20  # 65,536 stamps take a third of it
VERSION = 1


class BadTrace(ValueError):
    """A line that is no trace of a request; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Traced:
    """One request. Times are seconds of the host's monotonic clock."""

    id: str
    session: str | None  # a digest
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    queued_s: float
    begun_s: float | None
    first_token_s: float | None
    ended_s: float
    lanes: tuple[tuple[str, int], ...]  # with how many tokens there were when each began
    stamps_s: tuple[float, ...]

    @property
    def whole(self) -> bool:
        """Whether every token has its stamp."""
        return len(self.stamps_s) == self.tokens

    def streams(self) -> Iterator[tuple[str, Stream]]:
        """What ran on which lane, from the lane's beginning with it to its last token there, or the request's end."""
        ends = [*(begin for _, begin in self.lanes[1:]), len(self.stamps_s)]
        since_s = self.begun_s if self.begun_s is not None else self.queued_s
        for number, ((lane, begin), end) in enumerate(zip(self.lanes, ends, strict=False)):
            stamps = self.stamps_s[begin:end]
            last = number == len(self.lanes) - 1
            begin_s = min([since_s, *stamps]) if number == 0 else min(stamps, default=self.ended_s)
            end_s = max([self.ended_s, *stamps]) if last else max(stamps, default=begin_s)
            yield lane, Stream(begin_s, end_s, tuple(Stamp(each) for each in stamps))


def read_traces(paths: Iterable[Path]) -> Iterator[Traced]:
    """Every request of these files, or of the files of these directories, in the order of their ends. BadTrace."""
    for path in paths:
        for file in sorted(path.glob("requests-*.jsonl")) if path.is_dir() else [path]:
            yield from _of_file(file)


def lanes_of(traces: Iterable[Traced]) -> dict[str, list[Stream]]:
    """Streams by lane. BadTrace for a request whose stamps are not all there."""
    lanes: dict[str, list[Stream]] = {}
    for traced in traces:
        if not traced.whole:
            raise BadTrace(f"request {traced.id} has {traced.tokens} tokens and {len(traced.stamps_s)} stamps")
        for lane, stream in traced.streams():
            lanes.setdefault(lane, []).append(stream)
    return lanes


def parse(raw: Any) -> Traced:
    """From one line's JSON. BadTrace."""
    try:
        if not isinstance(raw, dict) or raw["v"] != VERSION:
            raise BadTrace("not a trace of version 1")
        lanes = tuple((str(name), _count(tokens)) for name, tokens in raw["lanes"])
        traced = Traced(
            id=str(raw["id"]),
            session=None if raw["session"] is None else str(raw["session"]),
            outcome=str(raw["outcome"]),
            prompt_tokens=_count(raw["prompt_tokens"]),
            cached_tokens=_count(raw["cached_tokens"]),
            tokens=_count(raw["tokens"]),
            queued_s=_time(raw["queued_s"]),
            begun_s=None if raw["begun_s"] is None else _time(raw["begun_s"]),
            first_token_s=None if raw["first_token_s"] is None else _time(raw["first_token_s"]),
            ended_s=_time(raw["ended_s"]),
            lanes=lanes,
            stamps_s=tuple(_time(each) for each in raw["stamps_s"]),
        )
    except BadTrace:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise BadTrace(f"{type(error).__name__}: {error}") from None
    begins = [begin for _, begin in lanes]
    if begins != sorted(begins) or any(begin > traced.tokens for begin in begins) or begins[:1] not in ([], [0]):
        raise BadTrace("lanes that begin out of order")
    if len(traced.stamps_s) > traced.tokens or (traced.tokens and not lanes) or traced.ended_s < traced.queued_s:
        raise BadTrace("tokens, stamps and times do not fit together")
    return traced


def _of_file(path: Path) -> Iterator[Traced]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) > LINE_BYTES:
                    raise BadTrace(f"{path}:{number}: longer than {LINE_BYTES} bytes")
                return  # cut off: its server stopped in the middle of it
            try:
                yield parse(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise BadTrace(f"{path}:{number}: {error}") from None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadTrace(f"{value!r} is not a number of tokens")
    return value


def _time(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadTrace(f"{value!r} is not a time")
    return float(value)


def summary(paths: Sequence[Path], rules: Rules) -> dict[str, Any]:
    """Everything that is printed. BadTrace; ValueError when there is no request with a lane."""
    traces = list(read_traces(paths))
    found = aligned_aggregate(lanes_of(traces), rules)
    waits = sorted(each.first_token_s - each.queued_s for each in traces if each.first_token_s is not None)
    return {
        "requests": len(traces),
        "outcomes": dict(sorted(Counter(each.outcome for each in traces).items())),
        "sessions": len({each.session for each in traces if each.session}),
        "prompt_tokens": sum(each.prompt_tokens for each in traces),
        "cached_tokens": sum(each.cached_tokens for each in traces),
        "tokens": sum(each.tokens for each in traces),
        "first_token_median_s": round(waits[len(waits) // 2], 6) if waits else None,
        "valid": found.valid,
        "reasons": list(found.reasons),
        "window_s": round(found.window_s, 6),
        "tokens_per_s": round(found.tokens_per_s, 3),
        "lanes": {lane: round(found.lane_tokens_per_s(lane), 3) for lane in sorted(found.lane_tokens)},
        "rules": asdict(rules),
    }


def main() -> None:
    """Prints the aggregate of some traces."""
    parser = argparse.ArgumentParser(prog="python -m bench.request_trace")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--target", type=int, default=1, help="streams that make a lane busy")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="S")
    parser.add_argument("--min-window", type=float, default=60.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = summary(options.paths, Rules(options.target, options.warm_up, options.min_window))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:22}{value}")


if __name__ == "__main__":
    main()
