"""Every kernel of a GPU lane on the GPU that is there: values against the naive twins, then time, in one command.

A kernel's time is that of one CUDA graph with all layers' launches of it, over the layers; its bound is the bytes that
it must move over the copy rate measured at the start. A kernel that fails is reported and the others go on, unless the
device is lost. The sweep times other tile sizes of the expert kernels and checks that no bit depends on them.

    python -m bench.gpu_kernels --out kernels.json

Needs torch with CUDA, triton and numpy; nothing that only a lane's process needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from bench import bare_host, gpu_cases, gpu_products, result
from bench.gpu_attention import attention_cases
from bench.gpu_cases import Case, ExpertLayer, Records, Sizes
from lanes.device.capture import captured
from lanes.kernels import early, experts

REPEATS = 30  # replays of a graph; the median counts
COPY_BYTES = 2 << 30
# What the sweep tries, likely ones first: (rows of a tile, warps).
GATE_TILES = [(16, 4), (8, 4), (32, 8), (4, 4), (16, 8), (32, 4)]
DOWN_TILES = [(64, 4), (32, 4), (16, 2), (64, 8), (32, 8), (32, 2)]


def microseconds(layer: Callable[[int], object], layers: int, repeats: int = REPEATS) -> float:
    """Of one layer, in a graph of all of them."""

    def all_layers() -> None:
        for i in range(layers):
            layer(i)

    all_layers()  # each of them: layers whose tensors are aligned otherwise have kernels of their own
    torch.cuda.synchronize()
    graph = captured(all_layers)
    for _ in range(3):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times_ms = [float(start.elapsed_time(end)) for start, end in marks]
    return statistics.median(times_ms) * 1000 / layers


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (microseconds(lambda _: target.copy_(source), 1, repeats=8) * 1e-6)


class Report:
    """Prints a line per case and keeps the file up to date, so that what was measured outlives a lost process."""

    def __init__(self, started: float, rate: float, out: Path | None, frame: dict[str, Any]) -> None:
        self.started, self._rate, self._out = started, rate, out
        self.failed: list[str] = []
        self._cases: list[dict[str, Any]] = []
        self._frame = {**frame, "copy_bytes_per_s": round(rate), "cases": self._cases, "failed": self.failed}
        print(f"copy {rate / 1e12:.2f} TB/s (read + written)", flush=True)

    @property
    def elapsed_s(self) -> float:
        """Since the process began."""
        return time.monotonic() - self.started

    def fail(self, name: str, error: Exception) -> None:
        """Says so and goes on; raises where the device is lost: nothing more can be measured."""
        self.failed.append(name)
        print(f"{name:<46} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-3)
        self.save()
        torch.cuda.synchronize()

    def cases(self, name: str, group: Callable[[], Iterable[Case]]) -> Iterator[Case]:
        """Of a group, as far as it can be made."""
        try:
            yield from group()
        except Exception as error:
            self.fail(f"cases of {name}", error)

    def run(self, case: Case, rows: int, layers: int, **extra: object) -> float | None:
        """Checks and times one case: µs a layer, None where it failed."""
        name = f"{case.name}, {rows} row{'s' * (rows > 1)}"
        try:
            if case.check is not None:
                case.check()
                torch.cuda.synchronize()
            time_us = microseconds(case.layer, case.layers or layers)
        except Exception as error:  # whatever it is, the others are measured
            self.fail(name, error)
            return None
        bound_us = case.bytes / self._rate * 1e6
        self._cases.append({
            "name": case.name, "rows": rows, "us": round(time_us, 3), "bytes": case.bytes,
            "bound_us": round(bound_us, 3), "share": round(bound_us / time_us, 3), "launches": case.launches,
            "checked": case.check is not None, **extra,
        })  # fmt: skip
        checked = "values equal" if case.check else ""
        print(
            f"{name:<46} {time_us:8.2f} µs  {case.bytes / 1e6:8.2f} MB  bound {bound_us:6.2f} µs"
            f" {bound_us / time_us:4.0%}  {case.launches} launches  {checked}  [{self.elapsed_s:.0f} s]",
            flush=True,
        )
        self.save()
        return time_us

    def save(self) -> None:
        """Writes what there is."""
        if self._out is not None:
            self._out.write_text(json.dumps({**self._frame, "elapsed_s": round(self.elapsed_s, 1)}, indent=1) + "\n")


def sweep(report: Report, sizes: Sizes, records: Records, rows: int, until_s: float) -> None:
    """Tiles and warps of the expert kernels, until the time is up: no bit of y may depend on them."""
    layer = ExpertLayer(sizes, records, rows, "cuda")
    layer.all(0)
    want = layer.y.clone()

    def check() -> None:
        layer.y.fill_(float("nan"))
        layer.both(0)
        assert torch.equal(layer.y.view(torch.int32), want.view(torch.int32)), "bits of y differ"

    cases = {case.name: case for case in layer.cases()}
    for kind, name, tiles in (("gate_up", "GATE_TILE", GATE_TILES), ("down", "DOWN_TILE", DOWN_TILES)):
        kept, case = getattr(experts, name), cases[f"experts: {kind}"]
        found: list[tuple[float, tuple[int, int]]] = []
        for tile in tiles:
            if report.elapsed_s > until_s:
                print(f"sweep of {kind} stopped for want of time", flush=True)
                break
            setattr(experts, name, tile)
            title = f"sweep: {kind}, tile {tile[0]}, warps {tile[1]}"
            time_us = report.run(Case(title, 1, case.bytes, case.layer, check), rows, sizes.layers)
            if time_us is not None:
                found.append((time_us, tile))
        setattr(experts, name, kept)
        if found:
            print(f"best of {kind}, {rows} rows: {min(found)[0]:.2f} µs with tile, warps {min(found)[1]}", flush=True)


def whole_layer(cases: dict[str, Case]) -> list[Case]:
    """A DeltaNet layer with resident experts, every launch of it in order: each one begun early, and plainly."""
    mixing = ["stream: enter", "stream: lower", "stream: lift"]
    block = ["products: into a DeltaNet", "deltanet: all three", "products: out of a DeltaNet"]
    leave = "shared: leave"
    if "mixing: lower, lift" in cases:  # few rows
        mixing, leave = ["mixing: lower, lift"], "shared: leave into the streams"
        block = ["products: into a DeltaNet", "deltanet: in one", "products: into the streams"]
    moe = ["shared: enter", "route", "experts: gate_up, down", leave]
    names = (*mixing, *block, *mixing, *moe)
    if not cases.keys() >= set(names):
        return []  # what could not be made was reported
    parts = [cases[name] for name in names]

    def whole(layer: int) -> None:
        for part in parts:
            part.layer(layer)

    @contextmanager
    def plainly() -> Iterator[None]:
        early.ENABLED = False
        try:
            yield
        finally:
            early.ENABLED = True

    def not_early(layer: int) -> None:
        with plainly():
            whole(layer)

    def check() -> None:
        with plainly():
            for case in cases.values():
                if case.check is not None and not case.name.startswith("attention"):
                    case.check()

    launches, moved = sum(part.launches for part in parts), sum(part.bytes for part in parts)
    return [
        Case("layer: DeltaNet and experts", launches, moved, whole),
        Case("layer: the same, none begun early", launches, moved, not_early, check),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where a kernel failed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default="1,4,2,3", help="rows of a window, comma-separated (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name contains this (default: all)")
    parser.add_argument("--until-s", type=float, default=90.0, help="starts nothing later (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="ends then, whatever hangs (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_kernels: no CUDA device\n")
    torch.manual_seed(0)
    sizes, all_rows = Sizes(), [int(r) for r in options.rows.split(",")]
    device = torch.cuda.get_device_properties(0)
    frame = result.frame(
        "bench.gpu_kernels", ["--rows", options.rows], pack={"format": sizes.format, "layers": sizes.layers},
        conditions={"gpu": device.name, "multiprocessors": device.multi_processor_count, "repeats": REPEATS},
        packages=("torch", "triton"),
    )  # fmt: skip
    report = Report(started, copy_rate(), options.out, frame)
    one = torch.zeros(1, device="cuda")
    report.run(Case("nothing: one element", 1, 8, lambda _: one.add_(1)), 1, sizes.layers)
    records = Records(sizes, max(all_rows), "cuda")
    for rows in all_rows:
        if report.elapsed_s > options.until_s:
            print(f"{rows} rows: not begun for want of time", flush=True)
            continue
        ends = rows in (min(all_rows), max(all_rows))
        groups: dict[str, Callable[[], Iterable[Case]]] = {
            "experts": lambda rows=rows: ExpertLayer(sizes, records, rows, "cuda").cases(),  # type: ignore[misc]
            "stream": partial(gpu_products.stream_products, sizes, rows, "cuda"),
            "projections": partial(gpu_products.projection_products, sizes, rows, "cuda"),
            "shared": partial(gpu_products.shared_products, sizes, rows, "cuda"),
            "dense": partial(gpu_cases.dense_cases, sizes, rows, "cuda"),
        }
        if ends:  # the keys of a long sequence are many: not for the rows between
            groups["attention"] = partial(attention_cases, sizes, rows, "cuda")
        cases: dict[str, Case] = {}
        for name, group in groups.items():
            for case in report.cases(name, group):
                cases[case.name] = case
                if options.only in case.name and (ends or case.check) and report.elapsed_s < options.until_s:
                    report.run(case, rows, sizes.layers)
        for case in whole_layer(cases):
            if options.only in case.name and ends and report.elapsed_s < options.until_s:
                report.run(case, rows, sizes.layers)
        if ends and options.only in "sweep":
            try:
                sweep(report, sizes, records, rows, options.until_s * (0.5 if rows == all_rows[0] else 1.0))
            except Exception as error:
                report.fail("sweep", error)
    report.save()
    print(f"{len(report.failed)} failed {report.failed}; {report.elapsed_s:.0f} s; triton {triton.__version__}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
