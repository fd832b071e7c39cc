"""`python -m bench.gpu_lane_check`: what must hold of a lane on a GPU, on small random packs, in a minute or two.

A line a case: ok or FAILED, what it is, its figures; then the whole as JSON. One that fails does not stop the others.
Exit code 0 exactly when all held. Not here: speed at the true size (bench.gpu_kernels, and a lane of bench.synthetic).

    python -m bench.gpu_lane_check --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from bench import bare_host
from bench import gpu_lane_cases as cases
from bench.gpu_lane_rig import CONTEXT, gpu_lane, small_pack
from lanes.device import cuda
from lanes.device.pin import PinnedRegion
from shared_experts.attach import AttachedRegion, attach_descriptor
from shared_experts.fill import build
from shared_experts.pack import Pack
from shared_experts.region import RegionShape

TOKENS = cases.PROMPT + 24


def region(pack: Pack, device: str) -> str:
    """A sealed region, registered read-only; a record's bytes as the device reads them."""
    from lanes.experts.gpu import driver

    with _region(pack) as attached, PinnedRegion(attached.base_address, attached.mapped_bytes) as pinned:
        info = pack.manifest.experts
        address = pinned.device_address(attached.record_address(1, 2))
        assert pinned.mode == "mapped", f"mode {pinned.mode}"
        assert address is not None
        found = torch.zeros(info.record_bytes, dtype=torch.uint8, device=device)
        driver.copy(found.data_ptr(), address, info.record_bytes, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert bytes(found.cpu().numpy()) == bytes(attached.record(1, 2)), "other bytes"
        moved = address - attached.record_address(1, 2)
        return f"{attached.mapped_bytes} bytes in {pinned.seconds * 1e3:.1f} ms, device address at {moved:+d}"


@contextlib.contextmanager
def _region(pack: Pack) -> Iterator[AttachedRegion]:
    shape = RegionShape.of(pack.manifest)
    sealed = build(pack.experts_path, shape, threads=2, on_step=lambda *_: None)
    with attach_descriptor(sealed.fd, shape) as attached:
        yield attached


def speed(pack: Pack, device: str, ids: Sequence[int]) -> str:
    """Milliseconds of a window on the small pack, launched one by one and captured: what launching costs."""
    told = []
    for capture in (False, True):
        lane = gpu_lane(pack, device, slots=10_000, capture=capture)
        for rows in (1, 4):
            slot = lane.states.open(CONTEXT)
            lane.windows(ids[:8], slot, [rows])
            began = time.perf_counter()
            lane.windows(ids[8:48], slot, [rows])
            told.append((time.perf_counter() - began) * 1e3 * rows / 40)
            lane.states.close(slot)
    launched, captured = told[:2], told[2:]
    return f"1 row {launched[0]:.2f} -> {captured[0]:.2f}, 4 rows {launched[1]:.2f} -> {captured[1]:.2f} ms a window"


CASES: dict[str, Callable[[Pack, str, Sequence[int]], str]] = {
    "cpu": cases.against_the_cpu,
    "drafts": cases.drafts_change_nothing,
    "turns": cases.taking_turns,
    "branches": cases.branching,
    "cache": cases.whatever_is_cached,
    "prompts": cases.whatever_feeds_a_prompt,
    "guesses": cases.guesses,
    "late guesses": cases.late_guesses,
    "captured": cases.captured_as_launched,
    "greatest": cases.greatest_alone,
    "share": cases.whoever_computes_misses,
    "speed": speed,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_lane_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", default="region," + ",".join(CASES), help="which, in this order (default: all)")
    parser.add_argument("--packs", default="q4g64-bf16,q8-f32", help="experts-dense of each (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="ends then, whatever hangs (default: %(default)s)")
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    results: dict[str, dict[str, object]] = {}

    def tell(name: str, run: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            held, text = True, run()
        except Exception as error:
            held, text = False, f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        seconds = round(time.perf_counter() - began, 1)
        results[name] = {"held": held, "found": text, "seconds": seconds}
        print(f"{'ok    ' if held else 'FAILED'} {name}: {text} ({seconds} s)", flush=True)

    if options.device == "cuda":
        tell("start", lambda: str(cuda.start()))
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.packs.split(","):
            experts, dense = kind.split("-")
            with small_pack(Path(folder), experts=experts, dense=dense) as pack:
                ids = cases.prompt(pack, TOKENS)
                for name in options.cases.split(","):
                    if name == "region":
                        if options.device == "cuda":
                            tell(f"{kind} region", lambda pack=pack: region(pack, options.device))  # type: ignore[misc]
                        continue
                    case = CASES[name]
                    tell(f"{kind} {name}", lambda case=case, pack=pack, ids=ids: case(pack, options.device, ids))  # type: ignore[misc]
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    print(json.dumps({"versions": versions, "results": results}))
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
