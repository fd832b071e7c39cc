"""How long one placement takes: `python -m bench.placement_decision [--lanes 64] [--prefixes 10000]`.

Every lane remembers that many prefixes; prompts of 100,000 tokens share their beginning with some of them. Not here:
whether the choice is good (placement).
"""

from __future__ import annotations

import argparse
import statistics
import time

from bench import result
from coordinator.policy.affinity import Seat
from coordinator.policy.placer import Job, Placer
from coordinator.policy.prefixes import Prefix
from coordinator.policy.rates import Counted

BLOCKS = 1562  # of a prompt of 100,000 tokens


def chain(prompt: int, blocks: int) -> bytes:
    """As long as a real one, and as different."""
    return prompt.to_bytes(8, "little") + blocks.to_bytes(8, "little")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--prefixes", type=int, default=10_000)
    parser.add_argument("--decisions", type=int, default=300)
    options = parser.parse_args()
    placer, seats = Placer(), [Seat(f"lane-{k}", b"1") for k in range(options.lanes)]
    for number, seat in enumerate(seats):
        placer.counted(seat, Counted(10_000, 5.0, 500, 20.0))
        prompts = (number + 7 * k for k in range(options.prefixes))
        placer.tell(seat, [Prefix(chain(p, 1 + p % BLOCKS), 64 * (1 + p % BLOCKS)) for p in prompts], [], anew=True)
    busy_s: dict[Seat, list[float]] = {seat: [1.0] if k % 2 else [] for k, seat in enumerate(seats)}
    taken_s: dict[str, list[float]] = {"known": [], "unknown": []}
    for k in range(options.decisions):
        for kind, prompt in (("known", 7 * k), ("unknown", (1 << 40) + k)):
            job = Job("session", 64 * BLOCKS, 500, [chain(prompt, blocks + 1) for blocks in range(BLOCKS)])
            began = time.perf_counter()
            placer.propose(job, placer.look(busy_s, 1))
            taken_s[kind].append(time.perf_counter() - began)
    measured = {
        kind: {
            "p50_ms": round(1e3 * statistics.median(each), 3),
            "p99_ms": round(1e3 * sorted(each)[-len(each) // 100], 3),
        }
        for kind, each in taken_s.items()
    }
    framed = result.frame("bench.placement_decision", [], pack={"name": "none"}, conditions=vars(options))
    result.write({**framed, **measured}, None)


if __name__ == "__main__":
    main()
