"""A prompt chunk's experts on the GPU that is there: bits against the decode kernels, then time, with and without link.

    resident    all records of a layer in VRAM: the grouped kernels alone, for several chunk sizes and tiles
    streamed    all records in pinned host memory: copied through a ring of slots while the steps before compute

One layer of the true shape, several times over. "Link rate" is that of plain copies of the same records, measured in
the same run; utilisation is the bytes that crossed over (time x that rate). Tokens per second are of expert layers
alone: what a model of --layers such layers could read at most. Not here: attention, DeltaNet, dense products.

    python -m bench.gpu_prefill --out bench/results/gpu_prefill.json

Needs torch with CUDA, triton and numpy.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import bare_host, result
from lanes.experts.feed import Feed
from lanes.experts.gpu.slots import DeviceArrival
from lanes.kernels import combine, experts, grouped, jobs, places
from lanes.kernels.fetch import fetch
from lanes.kernels.rows import Jobs, QuantisedRows
from shared_experts.layout import EXPERT_FORMATS, RecordLayout

HIDDEN, INNER, CHOSEN, EXPERTS = 2560, 640, 10, 512
TILES = [
    (64, (4, 3), (64, 8, 4, 3)),
    (64, (4, 2), (64, 8, 4, 2)),
    (64, (4, 3), (128, 5, 8, 2)),
    (32, (4, 3), (64, 8, 4, 2)),
]
CHECKED_ROWS = 64


class Layer:
    """Random records, rows and routing of one layer, and the scratch of its batches."""

    def __init__(self, rows: int, layout: RecordLayout, records: torch.Tensor, most_pairs: int) -> None:
        generator = np.random.default_rng(rows)
        self.layout, self.rows, self.records = layout, rows, records
        popular = generator.zipf(1.3, EXPERTS).clip(1, 200).astype(np.float64)  # few are chosen by many
        keys = generator.random((rows, EXPERTS)) ** (1 / popular[generator.permutation(EXPERTS)])
        ids = np.sort(np.argpartition(-keys, CHOSEN, axis=1)[:, :CHOSEN], axis=1)
        self.ids = torch.from_numpy(ids.astype(np.int32)).cuda()
        self.weights = torch.rand(rows, CHOSEN, device="cuda")
        self.x = torch.randn(rows, HIDDEN, device="cuda")
        self.quantised = QuantisedRows.room(rows, HIDDEN, layout.format.group, "cuda")
        counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
        room = max(most_pairs, int(counts.max()))
        self.scratch = grouped.Scratch.of(layout, room, EXPERTS, "cuda")
        self.out = torch.zeros(rows, HIDDEN, device="cuda")
        self.room = room

    def begin(self) -> places.Groups:
        """What precedes the first batch."""
        experts.quantise_rows(self.x, self.quantised, self.layout.format.group)
        self.out.zero_()
        return grouped.ask(self.ids, EXPERTS).groups()

    def run(self, groups: places.Groups, addresses: torch.Tensor, first: int, end: int) -> None:
        """Experts first..end-1."""
        for work in places.batches(groups, first, end, self.room):
            grouped.run(self.layout, addresses, groups, work, self.quantised, self.weights, self.scratch, self.out)

    def resident(self, addresses: torch.Tensor) -> None:
        """The layer, all records where `addresses` says."""
        self.run(self.begin(), addresses, 0, EXPERTS)


def check(layer: Layer, addresses: torch.Tensor) -> None:
    """The first rows of `out` are those of the decode kernels, four at a time, to the bit."""
    for first in range(0, min(CHECKED_ROWS, layer.rows), 4):
        part, pairs = slice(first, first + 4), 4 * CHOSEN
        work, group = Jobs.room(4, CHOSEN, "cuda"), layer.layout.format.group
        slots = torch.empty(pairs, dtype=torch.int32, device="cuda")
        none = torch.zeros(pairs + 1, dtype=torch.int32, device="cuda")
        x, out = QuantisedRows.room(4, HIDDEN, group, "cuda"), torch.empty(4, HIDDEN, device="cuda")
        h, y = torch.empty(pairs, INNER, device="cuda"), torch.empty(pairs, HIDDEN, device="cuda")
        jobs.jobs(layer.ids[part].contiguous(), torch.ones(EXPERTS, dtype=torch.int8, device="cuda"), none, work, slots)
        experts.quantise_rows(layer.x[part].contiguous(), x, group)
        experts.gate_up(layer.layout, addresses, work, x, h)
        between = QuantisedRows.room(pairs, INNER, group, "cuda")
        experts.quantise_rows(h, between, group)
        experts.down(layer.layout, addresses, work, between, y)
        combine.combine(layer.weights[part].contiguous(), y, y, slots, out)
        same = out.view(torch.int32) == layer.out[part].view(torch.int32)
        assert bool(same.all()), f"rows {first}..{first + 3}: {int((~same).sum())} of {same.numel()} elements differ"


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median; host work counts, because a chunk's host work is on the way of the next launch."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Streams:
    """Implements `lanes.experts.feed.Link` over one layer's records, which are every layer's."""

    def __init__(self, home: torch.Tensor, slots: torch.Tensor) -> None:
        self._home, self._slots, self._side = home, slots, torch.cuda.Stream()

    def mark(self) -> torch.cuda.Event:
        """Of the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    def copy(self, layer: int, copies: Sequence[tuple[int, int]], after: object) -> DeviceArrival:
        """On a side stream."""
        assert isinstance(after, torch.cuda.Event)
        self._side.wait_event(after)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._side):
            began.record()
            for expert, slot in copies:
                self._slots[slot].copy_(self._home[expert], non_blocking=True)
            ended.record()
        return DeviceArrival(self._slots.device, began, ended)


def streamed(layer: Layer, home: torch.Tensor, slots: torch.Tensor, layers: int) -> None:
    """`layers` times the same layer, every record through the ring, in fixed order and before routing is known."""
    feed = Feed(len(slots), np.zeros((layers, EXPERTS), np.bool_), Streams(home, slots), layers)
    for number in range(layers):
        groups = layer.begin()  # waits for the rows' routing, as a layer does
        steps = feed.steps(number, range(EXPERTS))
        table = np.zeros(EXPERTS, np.int64)
        for step in steps:
            for expert, slot in step.copies:
                table[expert] = slots.data_ptr() + slot * layer.layout.record_bytes
        words = places.host_words(EXPERTS, groups.pair.device, torch.int64)
        words.numpy()[:] = table
        addresses = torch.empty(EXPERTS, dtype=torch.int64, device="cuda")
        fetch(words, addresses)
        for step in steps:
            feed.arrive(step)
            layer.run(groups, addresses, step.first, step.end)
            feed.over(step)


def copied(home: torch.Tensor, slots: torch.Tensor) -> None:
    """All records, and nothing else."""
    for expert in range(len(home)):
        slots[expert % len(slots)].copy_(home[expert], non_blocking=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per case and writes one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_prefill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--format", default="q4g64", choices=[n for n, f in EXPERT_FORMATS.items() if f.group])
    parser.add_argument("--rows", default="512,2048,4096,8192", help="chunk sizes (default: %(default)s)")
    parser.add_argument("--rings", default="4,64,256", help="slots of the ring (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=48, help="of the model that figures are for (default: %(default)s)"
    )
    parser.add_argument("--most-pairs", type=int, default=16_384, help="of a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="also other tiles, at 4,096 rows")
    parser.add_argument("--until-s", type=float, default=240.0, help="starts nothing later (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="ends then, whatever hangs (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    began = time.monotonic()
    layout = RecordLayout.of(EXPERT_FORMATS[options.format], HIDDEN, INNER)
    home = torch.empty((EXPERTS, layout.record_bytes), dtype=torch.uint8).random_()
    for at, numbers in ((layout.gate_up_scales, 2 * INNER * HIDDEN), (layout.down_scales, HIDDEN * INNER)):
        count = numbers // layout.format.group
        scales = torch.empty((EXPERTS, count), dtype=torch.float16).normal_(0, 0.02)
        home[:, at : at + 2 * count] = scales.view(torch.uint8)
    home = home.pin_memory()
    records = home.cuda()
    addresses = records.data_ptr() + torch.arange(EXPERTS, dtype=torch.int64, device="cuda") * layout.record_bytes
    link_s = seconds(lambda: copied(home, records[:64]), options.repeats)
    records.copy_(home)
    rate = home.nbytes / link_s
    frame = result.frame("bench.gpu_prefill", [], pack={"records": "random", "format": options.format}, conditions={
        "device": torch.cuda.get_device_name(), "hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "chosen": CHOSEN,
        "layers": options.layers, "most_pairs": options.most_pairs,
    }, packages=("torch", "triton"))  # fmt: skip
    cases: list[dict[str, Any]] = []
    failed: list[str] = []
    print(f"link {rate / 1e9:.1f} GB/s, a layer's records {home.nbytes / 1e9:.2f} GB", flush=True)

    def case(name: str, call: Callable[[], object], rows: int, layers: int, crossed: int, layer: Layer) -> None:
        if time.monotonic() - began > options.until_s:
            print(f"{name:<44} not begun for want of time", flush=True)
            return
        try:
            call()
            torch.cuda.synchronize()
            check(layer, addresses)
            took_s = seconds(call, options.repeats) / layers
        except Exception as error:  # the others are measured
            failed.append(name)
            print(f"{name:<44} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=-3)
            torch.cuda.synchronize()  # raises where the device is lost
            return
        figures = {
            "name": name, "rows": rows, "ms_per_layer": round(took_s * 1e3, 3),
            "tokens_per_s": round(rows / (took_s * options.layers)), "crossed_bytes": crossed,
            "link_utilisation": round(crossed / took_s / rate, 3),
        }  # fmt: skip
        cases.append(figures)
        print(
            f"{name:<44} {figures['ms_per_layer']:9.3f} ms a layer, {figures['tokens_per_s']:>7} tokens/s,"
            f" link {figures['link_utilisation']:.2f}, values equal [{time.monotonic() - began:.0f} s]",
            flush=True,
        )
        if options.out is not None:
            found = {**frame, "link_bytes_per_s": round(rate), "cases": cases, "failed": failed}
            options.out.write_text(json.dumps(found, indent=1) + "\n")

    sizes = [int(word) for word in options.rings.split(",")]
    rings = [torch.empty((size, layout.record_bytes), dtype=torch.uint8, device="cuda") for size in sizes]
    for rows in (int(word) for word in options.rows.split(",")):
        layer = Layer(rows, layout, records, options.most_pairs)
        case(f"resident, {rows} rows", functools.partial(layer.resident, addresses), rows, 1, 0, layer)
        for slots in rings:
            name = f"streamed, {rows} rows, ring of {len(slots)}"
            case(name, functools.partial(streamed, layer, home, slots, 4), rows, 4, home.nbytes, layer)
    if options.sweep:
        for tile in TILES:
            grouped.BLOCK_ROWS, grouped.GATE, grouped.DOWN = tile
            layer = Layer(4096, layout, records, options.most_pairs)
            name = "resident, 4096 rows, tile {}, gate-up {}, down {}".format(*tile)
            case(name, functools.partial(layer.resident, addresses), 4096, 1, 0, layer)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
