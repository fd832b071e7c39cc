"""`python -m bench.synthetic`: makes a synthetic model, prints what it is and how uneven its experts are used.

    python -m bench.synthetic --scale gigabyte                        made, measured, gone again
    python -m bench.synthetic --scale true --hold RUN_DIR --keep DIR  held for lanes: python -m lanes --owner
                                                                      RUN_DIR/owner.sock --pack DIR ...; and for
                                                                      expressway serve DIR, whose owner adopts it

The skew is that of a CPU lane's own routing over a stretch of the walk; at the true size a CPU takes minutes for
that, so there it is measured only when asked for (`bench.decode` measures its own run's).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.result import frame, write
from bench.synthetic.pack import DIGESTS, SEED, Synthetic, made
from bench.synthetic.shape import SHAPES, Shape
from bench.synthetic.walk import DIGESTS as WALK_DIGESTS
from coordinator.host.rundir import regions_path
from shared_experts.owner import run_directory
from shared_experts.rendezvous import Rendezvous

PROMPT_TOKENS = 64
MEASURED_TOKENS = 600


def described(synthetic: Synthetic) -> dict[str, object]:
    """The `pack` of a result: sizes, fingerprint, whether the bytes are the frozen ones (None: none were frozen)."""
    manifest, config = synthetic.manifest, synthetic.shape.config
    walked, weights = synthetic.walk.digest(), synthetic.digest
    frozen_walk, frozen_weights = WALK_DIGESTS.get(synthetic.shape.name), DIGESTS.get(synthetic.shape.name)
    return {
        "synthetic": synthetic.shape.name,
        "format": manifest.experts.format, "layers": config.num_hidden_layers, "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok, "hidden": config.hidden_size,
        "intermediate": config.moe_intermediate_size, "vocabulary": config.vocab_size,
        "region_bytes": synthetic.region.header.total_bytes,
        "dense_bytes": next(s.bytes for s in manifest.sections if s.name == "dense"),
        "fingerprint": manifest.fingerprint.hex(),
        "walk": walked, "walk_is_frozen": None if frozen_walk is None else walked == frozen_walk,
        "weights": weights, "weights_are_frozen": None if frozen_weights is None else weights == frozen_weights,
    }  # fmt: skip


def measured(synthetic: Synthetic, folder: Path, tokens: int) -> dict[str, object]:
    """What a CPU lane's answer of so many tokens shows."""
    from bench.own_lane import started  # torch, which only this needs
    from bench.synthetic import measure

    run, trace = run_directory(folder / "run"), folder / "routing.trace"
    options = (
        "--owner", f"{run}/owner.sock", "--pack", str(synthetic.folder), "--listen", f"unix:{run}/lane.sock",
        "--vram-budget", "0", "--drafts", "0", "--context", str(PROMPT_TOKENS + tokens), "--trace-routing", str(trace),
    )  # fmt: skip
    began_s = time.perf_counter()
    with synthetic.lend(run / "owner.sock"), started(options) as lane:
        loaded_s = time.perf_counter() - began_s
        answer = lane.ask(synthetic.walk.stretch(0, PROMPT_TOKENS), tokens)
    layers, experts, keys = measure.decode_keys(trace)
    followed = sum(a == b for a, b in zip(answer.ids, synthetic.walk.stretch(PROMPT_TOKENS, tokens), strict=True))
    return {
        "tokens": tokens,
        "hottest_tenth_takes": round(measure.skew(keys, layers * experts), 3),
        "of_the_last_eighth_of_a_layer": round(measure.recent(keys, layers, experts, experts // 8), 3),
        "of_the_last_quarter_of_a_layer": round(measure.recent(keys, layers, experts, experts // 4), 3),
        "follows_the_walk": round(followed / tokens, 4),
        "lane_ready_s": round(loaded_s, 2),
    }


def hold(synthetic: Synthetic, run: Path) -> None:
    """Lends the region at `owner.sock` of a run directory, also to this user's owners, until SIGTERM or SIGINT."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    os.umask(0o077)
    meeting = Rendezvous(run_directory(regions_path()), synthetic.manifest.fingerprint, run_directory(run))
    with synthetic.lend(run / "owner.sock"):
        while (lock := meeting.try_lock()) is None and not ended.wait(0.1):
            pass
        if lock is not None:
            meeting.sweep()
            meeting.join()
            os.close(lock)
            sys.stderr.write(f"held: {run}/owner.sock\n")
            ended.wait()
    meeting.leave()


def chosen(options: argparse.Namespace) -> Shape:
    """The shape that the options ask for."""
    return SHAPES[options.scale].changed(layers=options.layers, experts=options.experts, ngram=not options.no_ngram)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes it, prints one JSON object, and lets it go."""
    parser = argparse.ArgumentParser(prog="python -m bench.synthetic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", choices=tuple(SHAPES), default="true")
    parser.add_argument("--format", choices=("q4g64", "q4g32", "q8"), default="q4g64")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--experts", type=int, help="another number of experts a layer")
    parser.add_argument("--no-ngram", action="store_true", help="without the n-gram layer and its table")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that make it (default: all)")
    parser.add_argument("--seed", type=int, default=SEED)
    help_measure = f"let a CPU lane answer so many (default: {MEASURED_TOKENS}, at the true scale none)"
    parser.add_argument("--measure", type=int, metavar="TOKENS", help=help_measure)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the pack there, a new directory, and leave it")
    parser.add_argument("--hold", type=Path, metavar="RUN_DIR", help="lend the region there until a signal ends it")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep: {options.keep} is already there")
    tokens = options.measure if options.measure is not None else MEASURED_TOKENS * (options.scale != "true")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as a lane does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        with made(
            options.keep or folder / "pack", chosen(options), format=options.format, seed=options.seed,
            threads=options.threads,
        ) as synthetic:  # fmt: skip
            seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            total = synthetic.region.header.total_bytes
            result = frame(
                "bench.synthetic",
                argv,
                pack=described(synthetic),
                conditions={"threads": options.threads, "page_bytes": synthetic.region.page_bytes},
                packages=("numpy",),
            )
            figures: dict[str, object] = {
                "seconds": round(seconds, 2), "cpu_seconds": round(cpu_s, 2), "of_which": synthetic.seconds,
                "experts_gb_per_s": round(total / 1e9 / max(synthetic.seconds["experts"], 0.01), 2),
            }  # fmt: skip
            if tokens:
                figures["routing"] = measured(synthetic, folder, tokens)
            write({**result, "figures": figures}, options.out)
            if options.hold:
                hold(synthetic, options.hold)
    return 0


if __name__ == "__main__":
    sys.exit(main())
