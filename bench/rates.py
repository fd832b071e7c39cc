"""The rates of this host's CPU lanes, for `expressway plan --rates`, and how well a plan made with them predicts.

Three packs of random weights are served side by side and asked in turns, one at a time: a narrow one, whose token is
nearly all fixed work of a layer; a wide one, whose token is nearly all reading of weights; and one between, which no
rate is taken from. From the first two: layer time and bytes a second; the third says how far the prediction is off.
Not here: the prediction itself, which is asked of `expressway plan`. Invariant: the held-out pack changes no rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc

from bench.checkpoint import PRESETS, write_checkpoint
from bench.client import ask_now
from bench.cluster import Cluster
from bench.result import frame, write

CLI = (sys.executable, "-m", "coordinator.cli")
DOORS = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--page", "off")
PACKS = {
    "narrow": PRESETS["tiny"],
    "wide": replace(
        PRESETS["demo"], hidden_size=1024, ple_embed_dim=1024, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=8,
    ),
    "held out": PRESETS["demo"],
}  # fmt: skip
TOKENS = 48
PROMPT = "Say something."
# records of the narrow pack have no multiple of 64
FORMATS = {"narrow": "q4g32", "wide": "q4g64", "held out": "q4g64"}


def make_packs(folder: Path) -> dict[str, Path]:
    """All three."""
    packs = {}
    for name, config in PACKS.items():
        checkpoint, packs[name] = folder / f"{name[:4]}-checkpoint", folder / f"{name[:4]}-pack"
        write_checkpoint(checkpoint, config)
        words = [str(checkpoint), str(packs[name]), "--experts", FORMATS[name], "--no-golden"]
        subprocess.run([*CLI, "pack", *words], check=True, stdout=sys.stderr)
    return packs


def planned(pack: Path, *options: str) -> dict[str, Any]:
    """The object of `expressway plan --json` for one lane."""
    done = subprocess.run(
        [*CLI, "plan", str(pack), "--json", "--lanes", "1", *options], check=True, capture_output=True
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def step_times_s(packs: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """The median time between tokens of each answer, by pack; packs in turns."""
    seen: dict[str, list[float]] = {name: [] for name in packs}
    with contextlib.ExitStack() as stack:
        channels = {}
        for name, pack in packs.items():
            words = (*DOORS, "--cluster", f"rates-{name[:4]}", "--vram-budget", "64MiB")
            cluster = stack.enter_context(Cluster(pack, words, quiet=True))
            channels[name] = stack.enter_context(grpc.insecure_channel(cluster.grpc))
            ask_now(channels[name], PROMPT, max_tokens=TOKENS)  # a warm cache, and every page touched
        for _ in range(rounds):
            for name, channel in channels.items():
                stamps = ask_now(channel, PROMPT, max_tokens=TOKENS)
                seen[name].append(statistics.median(b - a for a, b in pairwise(stamps)))
    return seen


def solve(narrow: dict[str, Any], wide: dict[str, Any], times_s: dict[str, float], cores: int) -> dict[str, float]:
    """layer time and rate of a core from two packs: time = layers * layer + bytes / (cores * core)."""
    layers, read = {}, {}
    for name, said in (("narrow", narrow), ("wide", wide)):
        layers[name] = said["model"]["layers"]
        read[name] = sum(low for low, _ in said["plans"][0]["bytes_per_token"].values())
    det = layers["narrow"] * read["wide"] - layers["wide"] * read["narrow"]
    layer_s = (times_s["narrow"] * read["wide"] - times_s["wide"] * read["narrow"]) / det
    per_byte_s = (layers["narrow"] * times_s["wide"] - layers["wide"] * times_s["narrow"]) / det
    if layer_s <= 0 or per_byte_s <= 0:
        raise ValueError("the times of the two packs do not tell a layer's work from reading: too noisy")
    return {"cpu_layer_us": layer_s * 1e6, "core_gb_per_s": 1 / per_byte_s / cores / 1e9}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object, which is also what `plan --rates` reads."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, choices=range(3, 101), metavar="N", help="default: 9")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    asked = parser.parse_args(words)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="exw-") as name:
        packs = make_packs(Path(name))
        seen = step_times_s(packs, asked.rounds)
        times_s = {pack: statistics.median(values) for pack, values in seen.items()}
        rates = solve(planned(packs["narrow"]), planned(packs["wide"]), times_s, cores)
        rates["memory_gb_per_s"] = rates["core_gb_per_s"] * cores  # one lane had all cores
        file = Path(name) / "rates.json"
        file.write_text(json.dumps({"rates": rates}))
        said = planned(packs["held out"], "--rates", str(file))
        predicted = said["plans"][0]["tokens_per_s"][0]
    measured = 1 / times_s["held out"]
    conditions = {
        "rounds": asked.rounds, "tokens": TOKENS, "lanes": "one a pack, all cores each, asked one at a time",
        "definition": "median time between tokens of an answer, median over answers, packs in turns",
    }  # fmt: skip
    command = [w for k, w in enumerate(words) if w != "--out" and (k == 0 or words[k - 1] != "--out")]
    result = frame("bench.rates", command, pack={"values": "random", "packs": list(PACKS)}, conditions=conditions,
                   packages=("torch", "expressway"))  # fmt: skip
    ratio = predicted / measured
    figures = {
        "rates": rates,
        "milliseconds": {pack: [round(t * 1e3, 3) for t in values] for pack, values in seen.items()},
        "held_out": {
            "predicted_tokens_per_s": predicted,
            "measured_tokens_per_s": measured,
            "predicted_over_measured": ratio,
            "within_20_percent": 0.8 <= ratio <= 1.2,
        },
    }
    write({**result, **figures}, asked.out)
    return 0 if 0.8 <= ratio <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
