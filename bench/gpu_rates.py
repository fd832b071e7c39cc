"""Rates of a GPU host for `expressway plan --rates`, out of what benches found there, and how well they predict.

    python -m bench.decode --device cuda --vram-budget 16GiB --cores 0-15 --out decode.json
    python -m bench.prefill --device cuda --vram-budget 16GiB --cores 0-15 --sizes 32768 --out prefill.json
    python -m bench.gpu_rates decode.json --prefill prefill.json --out rates.json
    expressway plan PACK --device cuda --vram 16GiB --rates rates.json

Ceilings are taken as they were measured. What a step takes beyond dense and resident bytes at them is fixed work of its
layers, handshake included, and misses at a share of link and CPU together (a layer's misses are few and whole, and it
waits for the later side): the line through the steps at forced hit rates. Runs under the lane's own cache policy are
held out: they change no rate, and say how far predictions are off. Of prompts, rates are what the lane timed at its
start (passes of 16 rows and of a chunk, products of one layer): all prompts of the file are held out, and its longest
one of a warm cache counts. Not here: any measuring, the prediction's formula of lanes and memory (`expressway plan`).
Invariant: pure but for reading and writing files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bound import Ceilings, StepBytes, step_s
from bench.result import write

KEPT = ("command", "versions", "host", "pack", "conditions", "vram_budget_bytes")
CLOSE = 0.2  # how far off a prediction may be


def solve(found: Mapping[str, Any]) -> dict[str, Any]:
    """The rates, and the prediction that was held out. ValueError where a run has not what they need."""
    said, cores = found["ceilings_gb_per_s"], int(found["host"]["cpus"])
    if said.get("hbm_copy") is None:
        raise ValueError("a run without a GPU: `python -m bench.rates` measures a host for CPU lanes")
    ceilings = Ceilings(**{name: gigabytes * 1e9 for name, gigabytes in said.items()})
    layers, dense = int(found["pack"]["layers"]), float(found["dense_bytes_per_step"])

    def hits_s(run: Mapping[str, Any]) -> float:
        return step_s(StepBytes(dense, run["resident_bytes"], 0), ceilings)

    def misses_s(run: Mapping[str, Any]) -> float:
        return step_s(StepBytes(0, 0, run["missed_bytes"]), ceilings)

    if not found["forced"]:
        raise ValueError("no step at a forced hit rate")
    layers_s, times = _line([(misses_s(run), 1 / run["tokens_per_s"] - hits_s(run)) for run in found["forced"]])
    if layers_s <= 0:
        raise ValueError("steps were faster than their bytes at the ceilings: those were measured too low")
    rates = {
        "gpu_gb_per_s": said["hbm_copy"],
        "link_gb_per_s": said["link_beside_cpu"],
        "memory_gb_per_s": said["cpu_beside_link"],
        "core_gb_per_s": round(said["cpu_beside_link"] / cores, 3),
        "gpu_layer_us": round(layers_s / layers * 1e6, 2),
        "gpu_miss_share": round(1 / times, 3),
        "handshake_us": 0.0,  # in the layers'
    }

    def told(run: Mapping[str, Any]) -> dict[str, Any]:
        measured = float(run["tokens_per_s"])
        predicted = 1 / (hits_s(run) + layers_s + times * misses_s(run))
        return {
            "hit_rate": run["hit_rate"],
            "predicted_tokens_per_s": round(predicted, 2),
            "measured_tokens_per_s": measured,
            "predicted_over_measured": round(predicted / measured, 3),
            "within_20_percent": abs(predicted / measured - 1) <= CLOSE,
        }

    return {
        "rates": rates,
        "held_out": told(found["adaptive"]),
        "held_out_other_budgets": [told(run) for run in found.get("other_budgets", [])],
    }


def _line(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b * x through (x, y), the middle one of all lines through two of them: one step that went wrong
    moves nothing. b is 1 at least, as nothing is faster than its ceiling."""
    slopes = [(d - b) / (c - a) for (a, b), (c, d) in itertools.combinations(seen, 2) if c != a]
    times = max(1.0, statistics.median(slopes)) if slopes else 1.0
    return statistics.median(y - times * x for x, y in seen), times


def solve_prompts(decoded: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The same of prompts, from a result of each bench on one pack."""
    if decoded["pack"]["fingerprint"] != found["pack"]["fingerprint"]:
        raise ValueError("the two results are of two packs")
    pace, link = found["lane_said"]["prompt_reading"]["pace"], found["ceilings_gb_per_s"]["link"]
    chunk = int(found["lane_said"]["prefill_chunk"]["rows"])
    step = decoded["forced"][0]  # a row is one token's: what a decode step reads
    rates = {
        "gpu_prompt_dense_gb_per_s": round(decoded["dense_bytes_per_step"] / pace["dense_row_s"] / 1e9, 1),
        "gpu_prompt_expert_gb_per_s": round(
            (step["resident_bytes"] + step["missed_bytes"]) / pace["expert_row_s"] / 1e9, 1
        ),
        "gpu_prompt_layer_us": round(pace["pass_s"] / int(found["pack"]["layers"]) * 1e6, 2),
    }
    row_s = pace["dense_row_s"] + pace["expert_row_s"]

    def told(prompt: Mapping[str, Any]) -> dict[str, Any]:
        passes = -(-prompt["tokens"] // chunk)
        seconds = passes * pace["pass_s"] + max(prompt["crossed_bytes"] / (link * 1e9), prompt["tokens"] * row_s)
        predicted = prompt["tokens"] / seconds
        return {
            "cache": prompt["cache"],
            "tokens": prompt["tokens"],
            "predicted_tokens_per_s": round(predicted, 1),
            "measured_tokens_per_s": prompt["tokens_per_s"],
            "predicted_over_measured": round(predicted / prompt["tokens_per_s"], 3),
        }

    prompts = [told(prompt) for prompt in found["prompts"]]
    longest = max(prompts, key=lambda each: (each["tokens"], each["cache"] == "warm"))
    return {
        "rates": rates,
        "held_out_prompts": prompts,
        "within_20_percent": abs(longest["predicted_over_measured"] - 1) <= CLOSE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when what was held out is not within 20 %."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_rates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("decode", type=Path, help="what bench.decode wrote")
    parser.add_argument("--prefill", type=Path, help="what bench.prefill wrote with the same pack on the same host")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    asked = parser.parse_args(argv)
    at = asked.decode
    try:
        found = json.loads(at.read_text())
        solved = solve(found)
        close = all(each["within_20_percent"] for each in (solved["held_out"], *solved["held_out_other_budgets"]))
        if at := asked.prefill:
            prompts = solve_prompts(found, json.loads(at.read_text()))
            close = close and prompts.pop("within_20_percent")
            solved = {**solved, "rates": solved["rates"] | prompts.pop("rates"), **prompts}
    except (KeyError, TypeError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {at}: {error}\n")
        return 1
    write({**{name: found.get(name) for name in KEPT}, **solved}, asked.out)
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
