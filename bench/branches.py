"""What a branch of a long root costs a lane: pages shared, against rows copied; and whether shared pages read slower.

    python -m bench.branches [--tokens 25000] [--branches 3] [--rounds 5] [--out FILE]

States of the true shape (2 key/value heads of 256, 13 attention layers, DeltaNet state beside), rows of random bits, no
model. Reading is what attention does at a decoded token: 2,048 rows chosen at random, gathered in every layer.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.result import frame, write
from lanes.state.pool import Branch, StatePool
from lanes.state.sequence import SequenceState
from lanes.state.shape import AttentionShape, RecurrentShape, StateShape

CHOSEN = 2048
SHAPE = StateShape(
    attention=dict.fromkeys(range(13), AttentionShape(2, 256, 128, 4, torch.bfloat16)),
    recurrent=dict.fromkeys(range(13, 49), RecurrentShape(48, 128, 128, 10240, 3)),
    ngram={},
    context_ids=2,
    context_fill=0,
    max_tokens=1 << 18,
)


def root_of(pool: StatePool, tokens: int) -> SequenceState:
    """A sequence of that many tokens."""
    state = pool[pool.open(tokens)]
    state.reserve(tokens)
    for rows in state.rows(0, tokens):
        rows.copy_(torch.randint(-100, 100, rows.shape, dtype=torch.int8))
    state.length = tokens
    return state


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def gather(state: SequenceState, tokens: int) -> None:
    """What the attention layers read for one token."""
    chosen = torch.randint(tokens, (CHOSEN,)).sort().values
    for attention in state.attention.values():
        attention.read(chosen)


def main() -> None:
    """Measures and writes one result."""
    parser = argparse.ArgumentParser(prog="python -m bench.branches", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=25_000)
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tokens, found = chosen.tokens, {}
    leaves = []
    for kind in (False, True):
        pool = StatePool(SHAPE, 1 << 40, paged=kind)
        root = root_of(pool, tokens)
        before = pool.reserved_bytes
        times = []
        for _ in range(chosen.branches):
            times.append(timed(functools.partial(pool.open, tokens, Branch(root, tokens, tokens))))
        growing = (pool.reserved_bytes - before) / chosen.branches - SHAPE.fixed_bytes()
        name = "shared" if kind else "copied"
        found[name] = {"ms": round(1e3 * statistics.median(times), 1), "mb": round(growing / 1e6, 1)}
        leaves.append((pool, pool[chosen.branches]))
    ratios = []
    for _ in range(20 * chosen.rounds):
        plain, paged = (timed(functools.partial(gather, state, tokens)) for _, state in leaves)
        ratios.append(paged / plain)
    result = frame(
        "bench.branches",
        ["--tokens", str(tokens), "--branches", str(chosen.branches), "--rounds", str(chosen.rounds)],
        pack={"name": "none: states of the true shape"},
        conditions={"tokens": tokens, "threads": 1, "gathered_rows": CHOSEN},
        packages=("torch",),
    )
    write({**result, "a_branch": found, "gather_time_ratio": round(statistics.median(ratios), 3)}, chosen.out)


if __name__ == "__main__":
    main()
