"""Which experts a lane really uses for a stretch of the walk: skew, recency, and whether the answer was the walk.

The routing is recorded by the lane itself (`--trace-routing`). Not here: speed. Invariant: figures are of one
conversation's decode windows, every one of one row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lanes.experts.trace import read_trace

HOTTEST = 0.1  # of the (layer, expert) pairs

Keys = list[npt.NDArray[np.int64]]  # of every decode window


def decode_keys(trace: Path) -> tuple[int, int, Keys]:
    """(layers, experts, keys used by every window of one row) of a recorded trace."""
    with read_trace(trace) as (header, windows):
        return header.layers, header.experts, [window.keys for window in windows if window.window_rows == 1]


def uses(keys: Keys, pairs: int) -> npt.NDArray[np.int64]:
    """How often each pair was used: [pairs]."""
    counted = np.zeros(pairs, np.int64)
    for window in keys:
        counted[window] += 1
    return counted


def skew(keys: Keys, pairs: int, share: float = HOTTEST) -> float:
    """The share of all uses that the hottest `share` of the pairs take."""
    hottest = np.sort(uses(keys, pairs))[::-1][: int(share * pairs)]
    return float(hottest.sum() / max(1, sum(map(len, keys))))


def recent(keys: Keys, layers: int, experts: int, held: int) -> float:
    """The share of uses, after the first quarter, of a pair among the `held` that its layer used last."""
    last = np.full((layers, experts), -1, np.int64)
    hits = asked = 0
    for number, window in enumerate(keys):
        layer, expert = np.divmod(window, experts)
        if number >= len(keys) // 4:
            oldest = -np.sort(-last, axis=1)[:, held - 1]
            hits += int(((last >= np.maximum(oldest, 0)[:, None])[layer, expert]).sum())
            asked += len(window)
        last[layer, expert] = number
    return hits / max(1, asked)
