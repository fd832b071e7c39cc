"""What a profile of hot experts brings to the first windows after a start, on the frozen traces.

The first half of a trace makes the profile, the second half is replayed from an empty cache, from the profile, and by
the lane that never stopped. A second half goes on where the first one ended, so this is a restart in mid-work,
the best case. Not here: steady rates (cache_policy).

    python -m bench.cache_warm_up
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.cache_policy import SWAPS, Replay, synthetic
from bench.result import frame, write
from bench.traces.synthetic import RECIPES
from lanes.experts.adaptive import adaptive, begun, remembered
from lanes.experts.policy import Budget, State

SPANS = ((0, 64), (64, 256), (256, None))  # decode windows


def hits(replay: Replay, state: State, budget: Budget) -> dict[str, float]:
    """Of the second half, by spans of decode windows."""
    counts = []
    for number in range(len(replay.windows) // 2, len(replay.windows)):
        window = replay.windows[number]
        if replay.is_decode(number):
            counts.append((np.count_nonzero(state.resident[window.keys]), window.keys.shape[0]))
        state, _ = adaptive(state, window, budget)
    found = np.array(counts)
    return {
        f"windows {first} to {last or 'the end'}": round(float(np.divide(*found[first:last].sum(axis=0))), 3)
        for first, last in SPANS
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_warm_up", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--share", type=float, default=0.15, help="of the experts that fit (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    tables = {}
    for name in RECIPES:
        replay = synthetic(name)
        budget = Budget(int(options.share * replay.keys), SWAPS)
        state = State.empty(replay.keys)
        for window in replay.windows[: len(replay.windows) // 2]:
            state, _ = adaptive(state, window, budget)
        starts = {
            "empty": State.empty(replay.keys),
            "profile": begun(remembered(state), budget.slots),
            "never stopped": state,
        }
        tables[name] = {start: hits(replay, of, budget) for start, of in starts.items()}
    framed = frame(
        "bench.cache_warm_up", list(argv if argv is not None else sys.argv[1:]), pack={"trace": "frozen, synthetic"},
        conditions={"share": options.share, "swaps": SWAPS}, packages=("numpy",),
    )  # fmt: skip
    write({**framed, "hits": tables}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
