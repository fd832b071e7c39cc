"""`python -m bench.exactness --device cuda`: the exactness table of one pack on a GPU, row by row, in a minute or two.

    python -m bench.exactness --device cuda --pack deploy/demo_model/pack --out exactness.json
    TRITON_INTERPRET=1 python -m bench.exactness --device cpu    # interpreted, a small random pack, a few of the rows
    TRITON_INTERPRET=1 python -m bench.exactness --device cpu --pack deploy/demo_model/pack --only "lane on the CPU"

Interpreted, a model ends behind its first layer with attention: layers of every kind, at the pack's sizes.

A line a row: held or FAILED, what it is, its figures, seconds; then the whole as JSON. A row that fails does not stop
the others. Exit code 0 exactly when all held.
Not here: what the rows are (exactness_cases, _states, _margins, _guesses).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import triton

from bench import asked, bare_host
from bench import exactness_cases as cases
from bench.exactness_cases import Ground
from bench.exactness_guesses import GUESSES
from bench.exactness_margins import MARGINS
from bench.exactness_states import STATES
from bench.gpu_lane_rig import small_pack, wide_tiles
from bench.near_tie import Apart
from lanes.device import cuda
from lanes.models.qwen4_exp.spec import Spec
from shared_experts.pack import Pack

TEXT = Path(__file__).parent  # sources, which the demo model knows the like of
# (tokens of the prompt, tokens that windows read, room of a sequence). With a small pack in the interpreter: few.
LENGTHS = {"cuda": (500, 40, 768), "cpu": (42, 4, 64)}
TABLE = {"bit-equal": cases.BITS | STATES, "margin-equal": MARGINS | GUESSES, "errors": cases.FAILURES}
INTERPRETED = ("repeat", "turns", "parked", "1 to 4 rows", "lane on the CPU", "NaN")


@contextlib.contextmanager
def opened(path: Path | None, kind: str) -> Iterator[Pack]:
    """The pack, or a small random one of that kind."""
    if path is not None:
        with Pack.open(path) as pack:
            yield pack
        return
    format, dense = kind.split("-")
    with tempfile.TemporaryDirectory() as folder, small_pack(Path(folder), experts=format, dense=dense) as pack:
        yield pack


def tokens(pack: Pack, count: int) -> tuple[list[int], str]:
    """So many ids, and what they are: text where the pack has a tokenizer and this host can read it, else random."""
    file = pack.path / "tokenizer.json"
    with contextlib.suppress(ImportError):
        from tokenizers import Tokenizer

        if file.exists():
            text = "\n".join(path.read_text() for path in sorted(TEXT.glob("*.py")))
            ids: list[int] = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
            return ids[:count], "sources"
    vocab = int(str(pack.manifest.config["vocab_size"]))
    return random.Random(1).choices(range(2, vocab), k=count), "random ids"  # noqa: S311 - not a secret


def ground(pack: Pack, device: str, lengths: tuple[int, int, int] | None = None) -> tuple[Ground, str]:
    """What the cases run on: an end of sequence stands in the middle of what windows read."""
    lengths = lengths or LENGTHS[device]
    prompt, rest, context = lengths
    ids, what = tokens(pack, prompt + rest)
    eos = pack.manifest.config.get("eos_token_id", 0)
    ids[prompt + rest // 2] = eos if isinstance(eos, int) else 0
    layers = None
    if device == "cpu":
        layers = min(Spec.from_config(pack.manifest.config).attention_layers, default=0) + 1
    return Ground(pack, device, ids, prompt, context, layers), what


def random_kind(text: str) -> str:
    """Formats of a random pack, as they were written."""
    if text.count("-") != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not EXPERTS-DENSE, such as q4g64-bf16")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=asked.device, choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pack", type=Path, help="a folder (default: a small random pack)")
    parser.add_argument(
        "--random",
        type=random_kind,
        metavar="EXPERTS-DENSE",
        default="q4g64-bf16",
        help="formats of the random pack (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="rows whose names have one of these words, comma-separated")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    parser.add_argument("--limit-s", type=float, default=240.0, help="ends then, whatever hangs (default: %(default)s)")
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    if options.device == "cpu" and not triton.knobs.runtime.interpret:
        parser.error("on the CPU kernels are interpreted: set TRITON_INTERPRET=1")
    words = [word for word in options.only.split(",") if word] or (INTERPRETED if options.device == "cpu" else [""])
    if not any(word in name for rows in TABLE.values() for name in rows for word in words):
        parser.error(f"--only: no row's name has one of {options.only!r}")
    results: dict[str, dict[str, object]] = {}

    def tell(name: str, run: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            held, text = True, run()
        except Exception as error:
            held, text = False, f"{'' if isinstance(error, Apart) else type(error).__name__ + ': '}{error}"
            if not isinstance(error, Apart):
                traceback.print_exc(file=sys.stderr)
        seconds = time.perf_counter() - began
        results[name] = {"held": held, "found": text, "seconds": round(seconds, 1)}
        print(f"{'held  ' if held else 'FAILED'} {name:32} {seconds:5.1f} s  {text}", flush=True)
        if options.out is not None:  # a later row may hang until the time is up
            options.out.write_text(json.dumps({"unfinished": results}))

    if options.device == "cuda":
        tell("start", lambda: str(cuda.start()))
    with opened(options.pack, options.random) as pack:
        stands, what = ground(pack, options.device)
        info = pack.manifest.experts
        if options.device == "cpu":
            wide_tiles(info.layout)
        print(f"{pack.path.name}: {info.format} experts, {pack.manifest.dense_dtype} dense; {len(stands.ids)} {what}")
        for kind, rows in TABLE.items():
            print(f"-- {kind}")
            for name, case in rows.items():
                if any(word in name for word in words):
                    tell(name, lambda case=case: case(stands))  # type: ignore[misc]
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    whole = json.dumps({"versions": versions, "device": device, "tokens": what, "results": results})
    print(whole)
    if options.out is not None:
        options.out.write_text(whole)
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
