"""Replays routing traces through cache policies: hit rates, bytes copied, modelled time per token, cost of deciding.

Traces are the frozen synthetic ones (bench/traces), conversations of the synthetic model, or files that a lane recorded
(`--trace-routing`). Every policy sees
the same windows under the same byte and swap budget; figures are of the decode windows after the first quarter, which
also is the profile of the fixed set. The bound knows the future and copies for nothing.
Not here: the policy of the lanes (lanes/experts/adaptive), the others (cache_baselines).

Modelled time of a decode window, at rates measured on a GPU host with PCIe 5 x16: 2.0 ms of dense layers, 0.35 ms of
handshake, 1.6 us per resident expert, and the bytes of misses and copies (2.61 MB each) over what moves them: the link
alone (51 GB/s), or link and CPU together (115 GB/s).

    python -m bench.cache_policy --out bench/results/cache_policy.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cache_baselines import (
    clairvoyant_hits,
    fixed,
    least_frequently_used,
    least_recently_used,
    tiny_lfu,
)
from bench.result import frame, write
from bench.synthetic.pack import SEED
from bench.synthetic.routed import routed
from bench.synthetic.shape import SHAPES
from bench.traces.synthetic import DIGESTS, EXPERTS, LAYERS, RECIPES, digest, trace
from lanes.experts import adaptive as rules
from lanes.experts.policy import Budget, Policy, State, Touched
from lanes.experts.trace import read_trace

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3)
SWAPS = 25  # 64 MiB of records per window: 1.3 ms of a 51 GB/s link
RECORD_BYTES = 2_613_248
FIXED_S, RESIDENT_S = 2.35e-3, 1.6e-6
LINK_BYTES_PER_S, LINK_AND_CPU_BYTES_PER_S = 51e9, 115e9
UNLIMITED = 1 << 30
WALKED_TOKENS = 6000
PRICES = (1.0, 1.5, 2.0, 3.0)
PRICED_SHARES = (0.1, 0.14, 0.2)
# What was tried beside the rules as they stand: one constant at a time.
VARIATIONS: tuple[tuple[str, dict[str, float]], ...] = (
    ("as it stands", {}),
    ("no margin", {"MARGIN": -1.0}),
    ("margin 1", {"MARGIN": 0.0}),
    ("margin 3", {"MARGIN": 2.0}),
    ("margin 4", {"MARGIN": 3.0}),
    ("half-life 64 alone", {"SHORT": 64, "LONG": 64}),
    # A value is in uses of a spell of twice the memory of SHORT: what is compared with it goes along.
    ("half-life 128 alone", {"SHORT": 128, "LONG": 128, "MARGIN": 3.0, "FLOOR": 2.0}),
    ("half-life 256 alone", {"SHORT": 256, "LONG": 256, "MARGIN": 7.0, "FLOOR": 4.0}),
    ("half-lives 32 and 1024", {"SHORT": 32, "MARGIN": 0.0, "FLOOR": 0.5}),
    ("half-lives 64 and 256", {"LONG": 256}),
    ("half-lives 64 and 4096", {"LONG": 4096}),
    ("no recency", {"PATIENCE": 1e9}),
    ("patience 1.5", {"PATIENCE": 0.75}),
    ("patience 4.5", {"PATIENCE": 2.25}),
    ("patience 6", {"PATIENCE": 3.0}),
    ("prompts count 1 window", {"PROMPT_USES": 1}),
    ("prompts count 64 windows", {"PROMPT_USES": 64}),
    ("a prompt chunk uses every expert once", {"PROMPT_USES": 1 << 16}),
)


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace in memory."""

    name: str
    keys: int
    windows: list[Touched]
    decode_rows: int  # windows of more rows are prompt

    def is_decode(self, number: int) -> bool:
        """Whether that window is a decode step."""
        return self.windows[number].window_rows <= self.decode_rows

    @property
    def first(self) -> int:
        """The first window that counts."""
        return len(self.windows) // 4


def synthetic(name: str) -> Replay:
    """A frozen trace, checked against its digest."""
    windows = list(trace(name))
    if digest(windows) != DIGESTS[name]:
        raise SystemExit(f"{name}: the generator no longer makes the frozen trace")
    return Replay(name, LAYERS * EXPERTS, [Touched(w.keys, w.counts, w.rows) for w in windows], rules.PROMPT_USES)


def recorded(path: Path) -> Replay:
    """A file that a lane wrote."""
    with read_trace(path) as (header, windows):
        return Replay(path.stem, header.layers * header.experts, list(windows), rules.PROMPT_USES)


def walked(start: int) -> Replay:
    """A conversation of the synthetic model of the true shape, from a place of its walk on."""
    keys = routed(SHAPES["true"], SEED, start, WALKED_TOKENS)
    ones = np.ones(keys.shape[1], np.int64)
    return Replay(f"walk {start}", SHAPES["true"].pairs, [Touched(row, ones, 1) for row in keys], rules.PROMPT_USES)


def run(
    replay: Replay, policy: Policy, slots: int, swaps: int, copy_misses: float = 1.0, late: int = 0
) -> dict[str, float]:
    """Figures of one policy at one size; it is told that a copy costs as much as so many misses. What it admits is
    resident `late` windows later, and what it drops leaves one window before that."""
    state, budget = State.empty(replay.keys), Budget(slots, swaps, copy_misses)
    tables = deque([state.resident] * (late + 1), late + 1)  # after each window, the oldest first
    fresh = np.zeros(replay.keys, np.bool_)  # admitted while it counted, and not used since
    touched_count = hits = steps = copies = proven = 0
    costs = []
    for number, window in enumerate(replay.windows):
        counts = number >= replay.first
        if counts and replay.is_decode(number):
            steps += 1
            touched_count += window.keys.shape[0]
            hits += int(np.count_nonzero((tables[0] & tables[min(1, late)])[window.keys]))
        proven += int(np.count_nonzero(fresh[window.keys]))
        fresh[window.keys] = False
        began = time.perf_counter()
        state, plan = policy(state, window, budget)
        costs.append(time.perf_counter() - began)
        tables.append(state.resident)
        fresh[plan.evict] = False
        if counts:
            copies += plan.admit.shape[0]
            fresh[plan.admit] = True
    return {
        **times(hits / steps, (touched_count - hits) / steps, copies / steps),
        "admitted_hit_share": round(proven / copies, 3) if copies else 0.0,
        "policy_us_per_window_median": round(float(np.median(costs[replay.first :])) * 1e6, 1),
    }


def times(hits: float, misses: float, copies: float) -> dict[str, float]:
    """Per decode window: what happened, and the modelled tokens per second."""
    moved = (misses + copies) * RECORD_BYTES
    fixed_s = FIXED_S + hits * RESIDENT_S
    return {
        "hit_rate": round(hits / (hits + misses), 4),
        "copied_records_per_window": round(copies, 2),
        "copied_bytes_per_window": round(copies * RECORD_BYTES),
        "tokens_per_s_link": round(1 / (fixed_s + moved / LINK_BYTES_PER_S), 1),
        "tokens_per_s_link_and_cpu": round(1 / (fixed_s + moved / LINK_AND_CPU_BYTES_PER_S), 1),
    }


def bound(replay: Replay, slots: int) -> dict[str, float]:
    """The clairvoyant: no policy has more hits; its copies are free."""
    hits = clairvoyant_hits(replay.windows, replay.keys, slots)
    decode = [n for n in range(replay.first, len(replay.windows)) if replay.is_decode(n)]
    touched = sum(replay.windows[n].keys.shape[0] for n in decode)
    resident = int(hits[decode].sum())
    return times(resident / len(decode), (touched - resident) / len(decode), 0.0)


def profile(replay: Replay) -> Policy:
    """The fixed set: the hottest keys of the decode windows of the first quarter."""
    uses = np.zeros(replay.keys, np.int64)
    for number in range(replay.first):
        if replay.is_decode(number):
            uses[replay.windows[number].keys] += 1
    return fixed(uses)


def compare(replay: Replay, swaps: int) -> dict[str, object]:
    """Every policy at every size."""
    result: dict[str, object] = {}
    for share in SHARES:
        slots = int(share * replay.keys)
        held = run(replay, profile(replay), slots, swaps)
        entry = {
            "fixed": held,
            "lru": run(replay, least_recently_used, slots, swaps),
            "decayed_lfu": run(replay, least_frequently_used, slots, swaps),
            "tiny_lfu": run(replay, tiny_lfu, slots, swaps),
            "lru_any_number_of_copies": run(replay, least_recently_used, slots, UNLIMITED),
            "adaptive": run(replay, rules.adaptive, slots, swaps),
            "clairvoyant": bound(replay, slots),
        }
        for figures in entry.values():
            # Hits that the fixed set would have missed, for each copy.
            if copied := figures["copied_records_per_window"]:
                per_window = replay.windows[-1].keys.shape[0]
                saved = (figures["hit_rate"] - held["hit_rate"]) * per_window
                figures["bytes_saved_per_byte_copied"] = round(saved / copied, 2)
            figures["hits_against_fixed"] = round(figures["hit_rate"] / held["hit_rate"], 3)
            figures["tokens_against_fixed_link"] = round(figures["tokens_per_s_link"] / held["tokens_per_s_link"], 3)
        result[f"{share:.0%}"] = entry
        show(replay.name, f"{share:.0%}", entry)
    return result


def show(name: str, share: str, entry: dict[str, dict[str, float]]) -> None:
    """One line a policy, for a person."""
    for policy, f in entry.items():
        sys.stderr.write(
            f"{name:11} {share:>4} {policy:38} hits {f['hit_rate']:6.1%} copies {f['copied_records_per_window']:6.1f} "
            f"again {f.get('admitted_hit_share', 0):4.0%} tok/s {f['tokens_per_s_link']:6.1f} "
            f"{f['tokens_per_s_link_and_cpu']:6.1f} {f.get('policy_us_per_window_median', 0):6.0f} us\n"
        )


def priced(replay: Replay, share: float, swaps: int) -> dict[str, dict[str, float]]:
    """What a window costs in misses, its copies included, where a copy costs as much as so many and the policy is told
    so, and where it is told that it costs one."""
    result = {}
    slots = int(share * replay.keys)
    plain = run(replay, rules.adaptive, slots, swaps)
    per_window = int(replay.windows[-1].keys.shape[0])
    for price in PRICES:
        told = run(replay, rules.adaptive, slots, swaps, price)

        def cost(figures: dict[str, float], price: float = price) -> float:
            misses = (1 - figures["hit_rate"]) * per_window
            return round(misses + price * figures["copied_records_per_window"], 1)

        result[f"a copy costs {price:g}"] = {
            **told, "window_costs_misses": cost(told), "untold_window_costs_misses": cost(plain),
        }  # fmt: skip
        show(replay.name, f"{share:.0%}", {f"a copy costs {price:g}: {cost(told)} ({cost(plain)})": told})
    return result


@contextlib.contextmanager
def changed(constants: dict[str, float]) -> Iterator[None]:
    """The rules with other constants."""
    before = {name: getattr(rules, name) for name in ("SPELL", "_LONG_SHARE", *constants)}
    for name, value in constants.items():
        setattr(rules, name, value)
    short, long = (1 - 2.0 ** (-1 / half_life) for half_life in (rules.SHORT, rules.LONG))
    rules.SPELL, rules._LONG_SHARE = 2 / short, long / short
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(rules, name, value)


def vary(replay: Replay, share: float, swaps: int) -> dict[str, dict[str, float]]:
    """The adaptive policy with one constant changed at a time."""
    result = {}
    for name, constants in VARIATIONS:
        with changed(constants):
            result[name] = run(replay, rules.adaptive, int(share * replay.keys), swaps)
        show(replay.name, f"{share:.0%}", {name: result[name]})
    for late in (1, 2):
        name = f"tables {late} windows late"
        result[name] = run(replay, rules.adaptive, int(share * replay.keys), swaps, late=late)
        show(replay.name, f"{share:.0%}", {name: result[name]})
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Replays and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_policy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", action="append", choices=tuple(RECIPES), help="a frozen trace (default: all)")
    parser.add_argument("--recorded", action="append", type=Path, default=[], metavar="FILE", help="a lane's trace too")
    parser.add_argument(
        "--walk",
        action="append",
        type=int,
        default=[],
        metavar="PLACE",
        help="a conversation of the synthetic model from there on too (minutes)",
    )
    parser.add_argument("--swaps", type=int, default=SWAPS, help="copies between two windows (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    figures: dict[str, object] = {}
    for replay in itertools.chain(map(synthetic, options.trace or RECIPES), map(walked, options.walk)):
        figures[replay.name] = compare(replay, options.swaps)
        if replay.name != "stationary":
            figures[f"{replay.name}, variations at 15%"] = vary(replay, 0.15, options.swaps)
            for share in PRICED_SHARES:
                figures[f"{replay.name}, prices at {share:.0%}"] = priced(replay, share, options.swaps)
    for path in options.recorded:
        figures[f"recorded {path.stem}"] = compare(recorded(path), options.swaps)
    result = frame(
        "bench.cache_policy",
        argv,
        pack={"synthetic": {"layers": LAYERS, "experts": EXPERTS, "record_bytes": RECORD_BYTES}, "digests": DIGESTS},
        conditions={
            "swaps_per_window": options.swaps, "counted": "decode windows after the first quarter",
            "recorded": "their records are taken to be of the true size; hits and copies are counted",
            "model_of_time": {"fixed_s": FIXED_S, "resident_s": RESIDENT_S, "link_bytes_per_s": LINK_BYTES_PER_S,
                              "link_and_cpu_bytes_per_s": LINK_AND_CPU_BYTES_PER_S},
        },
        packages=("numpy",),
    )  # fmt: skip
    write({**result, "figures": figures}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
