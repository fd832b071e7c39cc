"""The native expert kernel against what memory can deliver, and against torch's own kernels, at the true shape.

Every candidate runs once in each round and medians over rounds are compared, so a noisy neighbour hits all of them
alike. Records lie in a shared mapping far larger than the last-level cache and are visited in one long cycle. The
memory rate is that of the same bytes read by the same threads (`ExpertKernel.read`) in the same rounds.
Not here: correctness (tests/unit/test_expert_kernel.py).

    python -m bench.expert_kernel --formats q4g64,q8 --threads 1,2 --out bench/results/expert_kernel.json
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.result import frame, write
from lanes.experts.native import ISAS, ExpertKernel
from shared_experts.layout import EXPERT_FORMATS, RecordLayout

HIDDEN, INTERMEDIATE, EXPERTS_PER_LAYER = 2560, 640, 10
REST_S = 0.003  # after torch: its OpenMP threads go on spinning for a while
WARM_UP_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Region:
    """Random records in one shared mapping; `next_layer` walks through them in a cycle."""

    layout: RecordLayout
    memory: mmap.mmap
    records: int

    @classmethod
    def make(cls, layout: RecordLayout, size_bytes: int) -> Region:
        """At least `size_bytes` of records, a whole number of layers."""
        layers = -(-size_bytes // (layout.record_bytes * EXPERTS_PER_LAYER))
        records = layers * EXPERTS_PER_LAYER
        descriptor = os.memfd_create("expert-kernel-bench")
        os.ftruncate(descriptor, records * layout.record_bytes)
        memory = mmap.mmap(descriptor, records * layout.record_bytes)
        os.close(descriptor)
        rng = np.random.default_rng(1)
        view = np.frombuffer(memory, np.uint8).reshape(records, layout.record_bytes)
        for record in view:
            record[: layout.gate_up_scales] = np.frombuffer(rng.bytes(layout.gate_up_scales), np.uint8)
            scales = record[layout.gate_up_scales :].view(np.float16)
            scales[:] = (0.005 + 0.01 * rng.random(len(scales), dtype=np.float32)).astype(np.float16)
        return cls(layout, memory, records)

    def layer_addresses(self) -> list[np.ndarray]:
        """The record addresses of each layer's experts: uint64 [10] each."""
        base = np.frombuffer(self.memory, np.uint8).ctypes.data
        every = base + np.arange(self.records, dtype=np.uint64) * np.uint64(self.layout.record_bytes)
        return list(every.reshape(-1, EXPERTS_PER_LAYER))


def weight_bytes(layout: RecordLayout) -> int:
    """Code and scale bytes of one expert."""
    elements = 3 * layout.hidden * layout.intermediate
    return elements * layout.format.bits // 8 + 2 * elements // layout.format.group


class TorchLayer:
    """The same experts through torch's `_weight_int4pack_mm_for_cpu` or `_weight_int8pack_mm`, in copies of its own.

    bf16 activations, the fast path of the first here: with fp32 ones it runs at a thirtieth of the speed. The second
    knows one scale per row only, so it reads less.
    """

    def __init__(self, layout: RecordLayout, layers: int, rows: int) -> None:
        group, h, i = layout.format.group, layout.hidden, layout.intermediate
        self.group, self.i, self.bits, dtype = group, i, layout.format.bits, torch.bfloat16
        self.x = torch.randn(rows, h).to(dtype)
        experts = layers * EXPERTS_PER_LAYER

        def pack(n: int, k: int) -> list[torch.Tensor]:
            if self.bits == 8:
                codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
                return [codes.clone() for _ in range(experts)]
            one = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 2)
            return [one.clone() for _ in range(experts)]

        def scales(n: int, k: int) -> list[torch.Tensor]:
            if self.bits == 8:
                return [torch.full((n,), 0.01, dtype=dtype)] * experts
            one = torch.stack([torch.full((k // group, n), 0.01), torch.zeros(k // group, n)], dim=2).to(dtype)
            return [one.clone() for _ in range(experts)]

        self.gate_up, self.down = pack(2 * i, h), pack(h, i)
        self.gate_up_scales, self.down_scales = scales(2 * i, h), scales(h, i)

    def run(self, layer: int) -> None:
        """All experts of one layer for every row."""
        for e in range(layer * EXPERTS_PER_LAYER, (layer + 1) * EXPERTS_PER_LAYER):
            gate_up = self._multiply(self.x, self.gate_up[e], self.gate_up_scales[e])
            h = torch.nn.functional.silu(gate_up[:, : self.i]) * gate_up[:, self.i :]
            self._multiply(h, self.down[e], self.down_scales[e])

    def _multiply(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, codes, scales)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, self.group, scales)
        return product


def rounds_of(candidates: dict[str, Callable[[int], None]], layers: int, rounds: int) -> dict[str, float]:
    """Median seconds of each candidate over interleaved rounds; every call gets a layer not seen for a whole cycle."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    at = 0
    for r in range(WARM_UP_ROUNDS + rounds):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run(at % layers)
            took = time.perf_counter() - begin
            at += 1
            if r >= WARM_UP_ROUNDS:
                times[name].append(took)
            if name == "torch":
                time.sleep(REST_S)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(
    region: Region, isas: Sequence[str], threads: int, rows: int, rounds: int, with_torch: bool
) -> dict[str, object]:
    """One table: read rate, our kernel per instruction set, torch."""
    layout = region.layout
    addresses = region.layer_addresses()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    kernels = {isa: ExpertKernel(layout, cores=cores, isa=isa) for isa in isas}
    offsets = np.arange(EXPERTS_PER_LAYER + 1, dtype=np.int32) * np.int32(rows)
    index = np.tile(np.arange(rows, dtype=np.int32), EXPERTS_PER_LAYER)
    x = np.random.default_rng(2).standard_normal((rows, layout.hidden), dtype=np.float32)
    out = np.empty((len(index), layout.hidden), np.float32)
    best = kernels[max(isas, key=ISAS.__getitem__)]
    candidates: dict[str, Callable[[int], None]] = {"read": lambda layer: _discard(best.read(addresses[layer]))}
    for isa, kernel in kernels.items():
        candidates[isa] = lambda layer, kernel=kernel: kernel.run(addresses[layer], offsets, index, x, out)  # type: ignore[misc]
    if with_torch:
        torch.set_num_threads(threads)
        candidates["torch"] = TorchLayer(layout, len(addresses), rows).run
    seconds = rounds_of(candidates, len(addresses), rounds)
    for kernel in kernels.values():
        kernel.close()
    total = EXPERTS_PER_LAYER * weight_bytes(layout)
    other = seconds.get("torch")
    return {
        "format": layout.format.name,
        "threads": threads,
        "rows": rows,
        "milliseconds": {name: round(s * 1e3, 4) for name, s in seconds.items()},
        "gigabytes_per_s": {name: round(total / s / 1e9, 2) for name, s in seconds.items()},
        "of_memory_read_rate": {isa: round(seconds["read"] / seconds[isa], 3) for isa in isas},
        "times_torch": {isa: round(other / seconds[isa], 2) for isa in isas} if other else {},
    }


def _discard(_: int) -> None:
    """Drops a value where a candidate must return nothing."""


def _some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of these."""

    def check(text: str) -> list[str]:
        chosen = text.split(",")
        if wrong := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(names)}")
        return chosen

    return check


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every combination asked for and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.expert_kernel", description=__doc__.split("\n")[0])
    here = [isa for isa in ISAS if ISAS[isa] <= ISAS[ExpertKernel.best_isa()]]
    quantised = [name for name, format in EXPERT_FORMATS.items() if format.group]
    parser.add_argument("--formats", type=_some_of(quantised), default=["q4g64"], help=f"some of {','.join(quantised)}")
    parser.add_argument("--isa", type=_some_of(here), default=here[1:] or here, help="instruction sets to measure")
    parser.add_argument("--threads", default="1,2", help="comma-separated thread counts")
    parser.add_argument("--rows", default="1,4", help="comma-separated rows per expert; torch is compared at one row")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--region-gib", type=float, default=1.1)
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    tables, formats = [], {}
    for name in options.formats:
        layout = RecordLayout.of(EXPERT_FORMATS[name], HIDDEN, INTERMEDIATE)
        region = Region.make(layout, int(options.region_gib * 2**30))
        tables += [
            measure(region, options.isa, int(threads), int(rows), options.rounds, rows == "1")
            for rows in options.rows.split(",")
            for threads in options.threads.split(",")
        ]
        formats[name] = {
            "record_bytes": layout.record_bytes, "records": region.records,
            "weight_bytes_per_layer": EXPERTS_PER_LAYER * weight_bytes(layout),
        }  # fmt: skip
    pack = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "values": "random", "formats": formats}
    conditions = {
        "experts_per_layer": EXPERTS_PER_LAYER, "region_pages": "4 KiB, shared memfd", "rounds": options.rounds,
        "statistic": "median of interleaved rounds",
    }  # fmt: skip
    arguments = list(argv if argv is not None else sys.argv[1:])
    framed = frame("bench.expert_kernel", arguments, pack=pack, conditions=conditions, packages=("numpy", "torch"))
    write({**framed, "tables": tables}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
