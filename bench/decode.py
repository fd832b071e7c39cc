"""One conversation on one lane, no drafts: tokens a second, where a step's time goes, how far that is from the bound.

A synthetic model (bench.synthetic) answers along its frozen walk. Measured in one run: the ceilings of this host's
memories; the lane under its own cache policy at each budget; the same stretch at forced hit rates, labelled so.

    python -m bench.decode --scale gigabyte --vram-budget 120MiB                                a CPU lane
    python -m bench.decode --device cuda --vram-budget 16GiB,24GiB --cores 0-15 --out bench/results/decode-h200.json

Not here: the measuring (decode_lane, a process for each job), definitions of ceilings and bound. Invariant: a figure at
a forced rate stands under "forced"; what was not measured is null, and a rate that there was no time for is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import asked, tied
from bench.bound import Ceilings, StepBytes, step_s
from bench.result import frame, write
from bench.synthetic.__main__ import described
from bench.synthetic.pack import SEED, Synthetic, made
from bench.synthetic.shape import SHAPES
from lanes.config import parse_bytes
from lanes.limits import MAX_DRAFTS
from shared_experts.owner import run_directory

FORCED = "55,65,75,85,95,100"
FORCED_TOKENS = 128  # few: all that they use has to be in the cache at 100 %
CEILINGS_S = 15.0  # kept for the second look
ENDS_S = 5.0  # from a job's last figures to its process's end
DRAFTED_AT, DRAFTED_ROUNDS = "75,100", 4
JOB_LIMIT_S = 3600.0
GIB = 1 << 30

Figures = dict[str, Any]


def job(kind: str, options: Sequence[str], *, limit_s: float = JOB_LIMIT_S, **rest: object) -> Figures:
    """Runs one measuring process; raises CalledProcessError or TimeoutExpired, its words are on standard error."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # before torch is loaded there, as a lane does
    if "cuda" not in options:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = tied.argv("-m", "bench.decode_lane")
    done = subprocess.run(
        command, input=json.dumps({"kind": kind, "options": list(options), **rest}), stdout=subprocess.PIPE, text=True,
        check=True, timeout=limit_s, env=environment,
    )  # fmt: skip
    found: Figures = json.loads(done.stdout)
    return found


class Jobs:
    """Runs jobs one after another until the time is up: one that fails does not stop the others, and what was found is
    printed (standard error) and written down after each."""

    def __init__(self, limit_s: float, out: Path | None) -> None:
        self._until_s, self._out = time.monotonic() + limit_s, out
        self.failed: dict[str, str] = {}
        self._found: dict[str, Figures] = {}

    def run(
        self, name: str, kind: str, options: Sequence[str], *, keep_s: float = 0.0, **rest: object
    ) -> Figures | None:  # fmt: skip
        """The figures; None where it failed, or was not begun for want of time, of which `keep_s` are for later jobs.

        A job that knows how ends in time with what it has: it is told `left_s`.
        """
        began_s = time.monotonic()
        left_s = min(JOB_LIMIT_S, self._until_s - began_s - keep_s)
        try:
            if left_s < 1.0:
                raise TimeoutError("not begun: the time is up")
            self._found[name] = job(kind, options, limit_s=left_s, left_s=left_s - ENDS_S, **rest)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        found = self._found.get(name)
        took_s = time.monotonic() - began_s
        print(f"{name} [{took_s:.0f} s]: {json.dumps(found or self.failed[name])}", file=sys.stderr, flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps({"unfinished": self._found, "failed": self.failed}, indent=1) + "\n")
        return found


def bounded(
    found: Mapping[str, Any], rates: Ceilings | None, dense_bytes: int, handshake_ms: float | None = None
) -> Figures:  # fmt: skip
    """The figures of a stretch with their bound, where rates were measured; it counts a handshake that was, and stands
    without it beside, as results of before handshakes were measured have it."""
    told = dict(found)
    if handshake_ms is not None and "milliseconds" in found:
        told["milliseconds"] = {**found["milliseconds"], "handshake": handshake_ms}
    if rates is None or "tokens_per_s" not in found:
        return {**told, "bound_tokens_per_s": None, "of_bound": None}
    moved = StepBytes(dense_bytes, found["resident_bytes"], found["missed_bytes"])
    bound, counts = 1 / step_s(moved, rates), Figures(bound_counts="no handshake")
    if handshake_ms is not None:
        counts = {"bound_counts": "handshake, measured here", "bound_without_handshake": round(bound, 2)}
        bound = 1 / step_s(moved, rates, handshake_ms / 1e3)
    return {
        **told, "bound_tokens_per_s": round(bound, 2), "of_bound": round(found["tokens_per_s"] / bound, 3), **counts,
    }  # fmt: skip


def measured(synthetic: Synthetic, folder: Path, chosen: argparse.Namespace, jobs: Jobs) -> Figures:
    """Every figure of the result; null where a job failed."""
    run, config, info = run_directory(folder / "run"), synthetic.shape.config, synthetic.manifest.experts
    tokens, warm, prompt = chosen.tokens, chosen.warm, chosen.prompt
    context = prompt + warm + 2 * tokens + 8
    options = [
        "--owner", str(run / "owner.sock"), "--pack", str(synthetic.folder), "--listen", f"unix:{run}/lane.sock",
        "--device", chosen.device, "--drafts", "0", "--context", str(context),
        *(("--cores", chosen.cores) if chosen.cores else ()),
        *(("--prefill-chunk", str(chosen.prefill_chunk)) if chosen.prefill_chunk else ()),
    ]  # fmt: skip
    common: dict[str, object] = {
        "vocabulary": config.vocab_size, "topics": synthetic.shape.topics, "start": chosen.start, "prompt": prompt,
        "warm": warm, "tokens": tokens, "record_bytes": info.record_bytes, "pairs": synthetic.shape.pairs,
        "choices": config.num_hidden_layers * config.num_experts_per_tok,
    }  # fmt: skip
    with synthetic.lend(run / "owner.sock"):
        before = jobs.run("ceilings before", "ceilings", [*options, "--vram-budget", "0"])
        first_budget, shaken = [*options, "--vram-budget", chosen.vram_budget[0]], None
        if chosen.device != "cpu":
            shaken = jobs.run("handshake", "handshake", first_budget, keep_s=CEILINGS_S)
        budgets: list[Figures] = []
        for number, budget in enumerate(chosen.vram_budget):
            budgeted, trace = [*options, "--vram-budget", budget], str(folder / f"{number}.trace")
            found = jobs.run(f"adaptive at {budget}", "adaptive", budgeted, keep_s=CEILINGS_S, **common, trace=trace)
            budgets.append({"vram_budget": budget, **(found or {})})
        points: list[Figures] = []
        everything = synthetic.region.header.total_bytes + 16 * GIB * (chosen.device == "cuda")
        if chosen.forced:
            found = jobs.run(
                "forced", "forced", [*options, "--vram-budget", chosen.forced_budget or str(everything)],
                keep_s=CEILINGS_S, **{**common, "tokens": min(tokens, FORCED_TOKENS)},
                trace=str(folder / "forced.trace"), rates=sorted(chosen.forced),
            )  # fmt: skip
            points = [{"forced": True, **point} for point in (found or {"points": []})["points"]]
        kernels = jobs.run("kernels", "kernels", first_budget, keep_s=CEILINGS_S, **common) if chosen.kernels else None
        drafted = None
        if chosen.drafted:
            narrowed: tuple[str, ...] = ()
            if chosen.draft_ids:
                ids = {"draft_vocabulary": 1, "ids": list(range(chosen.draft_ids))}
                (folder / "draft_ids.json").write_text(json.dumps(ids))
                narrowed = ("--draft-vocab", str(folder / "draft_ids.json"))
            drafted = jobs.run(
                "drafted", "drafted",
                [
                    *options, "--vram-budget", chosen.forced_budget or str(everything), "--drafts", str(MAX_DRAFTS),
                    *narrowed,
                ],
                keep_s=CEILINGS_S, **common, trace=str(folder / "drafted.trace"),
                shares=chosen.drafted, at=chosen.drafted_at, rounds=chosen.drafted_rounds,
                decoder_pairs=config.num_hidden_layers * config.num_experts,
            )  # fmt: skip
        after = jobs.run("ceilings after", "ceilings", [*options, "--vram-budget", "0"])
    looks = [look for look in (before, after) if look is not None]
    # Neighbours only ever make memory look slower: of two looks the better one is nearer to what it can deliver.
    best = {
        name: max(look["bytes_per_s"][name] for look in looks) for name in (looks[0]["bytes_per_s"] if looks else ())
    }
    rates, dense_bytes = (Ceilings(**best), looks[0]["dense_bytes"]) if looks else (None, 0)
    handshake_ms = shaken["milliseconds"]["handshake"] if shaken is not None else None
    first, *others = (bounded(found, rates, dense_bytes, handshake_ms) for found in budgets)
    return {
        **{name: first.get(name) for name in ("tokens_per_s", "hit_rate", "bound_tokens_per_s", "of_bound")},
        "vram_budget_bytes": parse_bytes(chosen.vram_budget[0]), "milliseconds": first.get("milliseconds"),
        "adaptive": first, "other_budgets": others,
        "forced": [bounded(point, rates, dense_bytes, handshake_ms) for point in points],
        "ceilings_gb_per_s": {name: round(rate / 1e9, 2) for name, rate in best.items()},
        "ceilings_looks_gb_per_s": [
            {name: round(rate / 1e9, 2) for name, rate in look["bytes_per_s"].items()} for look in looks
        ],
        "handshake": shaken, "gpu": kernels, "drafted": drafted, "dense_bytes_per_step": dense_bytes,
        "cores": looks[0]["cores"] if looks else None, "failed": jobs.failed,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=tuple(SHAPES), default="true", help="of the model (default: %(default)s)")
    parser.add_argument("--device", type=asked.device, choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--vram-budget",
        type=asked.sizes,
        action="extend",
        metavar="SIZE,…",
        help="one after the other; repeatable (default: 16GiB)",
    )
    parser.add_argument(
        "--cores", type=asked.cores, metavar="LIST", help="of the lane, for example 0-15 (default: all)"
    )
    parser.add_argument("--tokens", type=int, default=512, help="measured (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=1024, help="answered before (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of it (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="place in the walk (default: 0)")
    parser.add_argument(
        "--forced",
        type=asked.percents,
        metavar="LIST",
        default=FORCED,
        help=f"hit rates in percent, of {FORCED_TOKENS} tokens at most; empty: none (default: {FORCED})",
    )
    parser.add_argument(
        "--forced-budget", type=asked.size, metavar="SIZE", help="of the lane at forced rates (default: all experts)"
    )
    parser.add_argument("--kernels", action="store_true", help="GPU: also some steps by kernel, in a lane of their own")
    parser.add_argument(
        "--drafted",
        type=asked.percents,
        metavar="LIST",
        help="also drafts that are right so often, in percent, the most important share first; the model has a draft "
        "layer then",
    )
    parser.add_argument(
        "--drafted-at",
        type=asked.percents,
        metavar="LIST",
        default=DRAFTED_AT,
        help="at these hit rates in percent, in this order; 100 is everything in VRAM (default: %(default)s)",
    )
    parser.add_argument(
        "--drafted-rounds",
        type=int,
        metavar="N",
        default=DRAFTED_ROUNDS,
        help="answers with each share, each beside one without drafts (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-ids",
        type=int,
        metavar="N",
        help="of the draft layer's head, as a draft vocabulary leaves (default: all)",
    )
    parser.add_argument("--prefill-chunk", type=int, metavar="ROWS", help="of the lane (default: its own)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that make the model (default: all)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=JOB_LIMIT_S,
        help="for all measuring: what is not done by then fails (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    chosen = parser.parse_args(argv)
    chosen.vram_budget = chosen.vram_budget or ["16GiB"]
    if chosen.kernels and chosen.device == "cpu":
        parser.error("--kernels: a CPU lane has none")
    # What a guess costs takes a draft layer, which nothing else here asks.
    shape = SHAPES[chosen.scale].changed(draft_layers=int(bool(chosen.drafted)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with made(folder / "pack", shape, seed=SEED, threads=chosen.threads) as synthetic:
            jobs = Jobs(chosen.limit_s, chosen.out)
            found = measured(synthetic, folder, chosen, jobs)
            result = frame(
                "bench.decode",
                argv,
                pack=described(synthetic),
                conditions={
                    "device": chosen.device, "conversations": 1, "drafts": 0, "prompt_tokens": chosen.prompt,
                    "warm_tokens": chosen.warm, "measured_tokens": chosen.tokens,
                    "region_page_bytes": synthetic.region.page_bytes, "made_s": synthetic.seconds,
                    "draft_ids": chosen.draft_ids,
                },
                packages=("numpy", "torch"),
            )  # fmt: skip
    write({**result, **found}, chosen.out)
    return 1 if jobs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
