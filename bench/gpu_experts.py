"""Routed experts of a decode window on a GPU: values first, then where the time goes, against what memory gives.

A region of random records at the true record size, a graph of every layer's experts, and the sources a miss can be read
through: by the link (the GPU reads pinned host memory), by the CPU (doorbell and done words), by both. Chosen experts
are drawn anew for each replay, a fixed number of them not resident. Everything is measured in one run, interleaved,
medians; the bound is bytes over the rates of the same run. Not here: dense layers, attention, a model (bench/decode).

    python setup.py -q build_ext --inplace; python -m bench.gpu_experts --out gpu_experts.json
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("structlog") is None:  # a bare GPU host: nothing of what runs here logs
    sys.modules["structlog"] = ModuleType("structlog")
    sys.modules["structlog"].get_logger = lambda *names: None  # type: ignore[attr-defined]

from bench.gpu_window import CHOSEN, HIDDEN, INNER, Bench, Records, Window, keep, medians
from bench.result import frame, write
from lanes.counters import Counters
from lanes.device import cuda
from lanes.experts.cache import ExpertCache, slots_of
from lanes.experts.gpu.doorbell import KernelWords, StreamWords
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.share import Share
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.gpu.start import cores_of, start_share
from lanes.experts.native import ExpertKernel
from lanes.experts.policy import Touched
from lanes.experts.split import I32
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from shared_experts.manifest import ExpertsInfo

SETS = 48  # of chosen experts, one after another
COPY_BYTES = 4 << 30


def hbm_gb_s() -> float:
    """Of a device-to-device copy, bytes read and written."""
    a, b = (torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda").fill_(n) for n in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for _ in range(8):
        events[0].record()
        b.copy_(a)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return float(COPY_BYTES / statistics.median(times) / 1e6)


def timed(bench: Bench, share: Share, tables: dict[str, I32], rows: int, missing: float, rounds: int) -> dict[str, Any]:
    """Every way to the same bits at one share of misses, and the bound."""
    rng = np.random.default_rng(17)
    sets = [bench.ids(rng, rows, missing) for _ in range(SETS)]
    plain, shared = Window(bench, rows, None), Window(bench, rows, share)
    outs: dict[str, torch.Tensor] = {}

    def run(window: Window, name: str, number: int) -> float:
        if name in tables:
            share.split(tables[name])
        took = window.milliseconds(sets[number % SETS])
        if number == 0:
            outs[name] = window.out.clone()
        return took

    runs: dict[str, Callable[[int], float]] = {"link, no handshake": partial(run, plain, "link, no handshake")}
    for name in tables if missing else ("link",):
        runs[name] = partial(run, shared, name)
    times = medians(runs, rounds)
    first = outs["link, no handshake"]
    distinct = np.mean([[len(np.unique(layer)) for layer in ids.cpu().numpy()] for ids in sets])
    missed = np.mean(
        [[len(set(layer.ravel()) - set(range(bench.kept))) for layer in ids.cpu().numpy()] for ids in sets]
    )
    return {
        "rows": rows, "missing": missing, "distinct_experts_a_layer": round(float(distinct), 2),
        "missed_a_layer": round(float(missed), 2), "milliseconds": {n: round(t, 3) for n, t in times.items()},
        "equal_to_the_bit": {name: bool(torch.equal(out, first)) for name, out in outs.items()},
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, measures, prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=64, help="of a layer (default: %(default)s)")
    parser.add_argument("--resident", type=int, default=40, help="of a layer's experts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--climb", type=int, default=1500, help="windows of the search (default: %(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests/gpu first")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    tests = 0
    if not options.no_tests:
        # Without the project's settings: they name plugins that a GPU host may not have.
        names = ["tests/gpu/test_gpu_cache.py", "tests/gpu/test_gpu_share.py"]
        tests = int(pytest.main(["-q", "-c", os.devnull, "--rootdir", ".", "--durations=5", *names]))
    device = cuda.start()
    cores = sorted(os.sched_getaffinity(0))
    engine_core, share_cores = cores_of(cores)
    layout = RecordLayout.of(EXPERT_FORMATS["q4g64"], HIDDEN, INNER)
    info = ExpertsInfo("q4g64", HIDDEN, INNER, options.layers, 0, options.experts, layout.record_bytes)
    began_s = time.perf_counter()
    records = Records(info, len(cores))
    filled_s = time.perf_counter() - began_s
    resident = np.zeros((info.layers, info.experts), np.bool_)
    resident[:, : options.resident] = True
    budget = info.layers * options.resident * info.record_bytes
    counters = Counters()
    slots = DeviceSlots(slots_of(info, budget), info.record_bytes, device.device)
    cache = ExpertCache(records, info, budget, keep(resident.reshape(-1)), counters, slots, swap_bytes=budget)
    experts = GpuExperts(cache, info, CHOSEN, counters, device.device)
    bench = Bench(info, cache, experts, options.resident, device.device)
    nothing = Touched(np.empty(0, np.int64), np.empty(0, np.int64), 1)
    began_s = time.perf_counter()
    cache.turn(nothing)
    torch.cuda.synchronize()
    admitted_s = time.perf_counter() - began_s
    experts.end_window()
    assert (cache.resident == resident).all(), "the cache is not as it should be"
    os.sched_setaffinity(0, {engine_core})
    kernel = ExpertKernel(layout, cores=share_cores)
    refused: dict[str, str] = {}
    started = start_share(experts, cache, kernel, records.first, refused.__setitem__, core=share_cores[0])
    share, rates = started.share, started.rates
    by_rates = share.counts
    tables = {"link": share.most * 0, "cpu": share.most, "split by rates": by_rates}
    hbm = hbm_gb_s()
    results = [timed(bench, share, tables, rows, missing, options.rounds)
               for rows in (1, 4) for missing in (0.0, 0.25, 0.5)]  # fmt: skip
    share.search(rates)
    window, rng = Window(bench, 1, share), np.random.default_rng(23)
    sets, biases, climbed = [bench.ids(rng, 1, 0.25) for _ in range(SETS)], [], []
    share.on_split = lambda bias, counts: biases.append((bias, counts[:11].tolist()))
    for number in range(options.climb):
        climbed.append(window.milliseconds(sets[number % SETS]))
    record_mb = info.record_bytes / 1e6
    both = record_mb / rates.link_us + record_mb / rates.cpu_us  # TB/s
    for result in results:
        hits = result["distinct_experts_a_layer"] - result["missed_a_layer"]
        bound = info.layers * (hits * record_mb / hbm + result["missed_a_layer"] * record_mb / (both * 1e3))
        result["bound_milliseconds_without_handshake"] = round(bound, 3)
    handshake = results[0]["milliseconds"]
    figures = {
        "tests_exit": tests, "device": device.name, "cores": len(cores), "doorbell": share.doorbell.name,
        "refused": refused, "filled_s": round(filled_s, 2), "pin_s": round(records.pinned.seconds, 2),
        "admitted_gb_s": round(budget / admitted_s / 1e9, 1), "hbm_gb_s": round(hbm, 1),
        "rates_us": {name: round(value, 2) for name, value in asdict(rates).items()},
        "rates_gb_s": {name.removesuffix("_us"): round(record_mb * 1e3 / value, 1)
                       for name, value in asdict(rates).items() if name != "cpu_start_us" and value},
        "split_by_rates": by_rates[:11].tolist(),
        "handshake_us_a_layer": round((handshake["link"] - handshake["link, no handshake"]) * 1e3 / info.layers, 2),
        "windows": results,
        "climb": {"windows": options.climb, "found": biases[-3:],
                  "first_100_ms": round(statistics.median(climbed[:100]), 3),
                  "last_100_ms": round(statistics.median(climbed[-100:]), 3)},
    }  # fmt: skip
    share.split(share.most)
    for kind in (StreamWords, KernelWords):
        share.doorbell = kind(*share.words)
        one = Window(bench, 1, share)
        took = statistics.median(one.milliseconds(sets[number % SETS]) for number in range(options.rounds))
        figures[f"a_quarter_by_cpu_ms_with_{kind.name}_words"] = round(took, 3)
    share.close()
    kernel.close()
    pack = {"format": "q4g64", "layers": info.layers, "experts": info.experts, "hidden": HIDDEN, "intermediate": INNER}
    conditions = {"rounds": options.rounds, "resident_of_a_layer": options.resident, "statistic": "interleaved medians"}
    framed = frame(
        "bench.gpu_experts", list(argv if argv is not None else sys.argv[1:]), pack=pack, conditions=conditions,
        packages=("torch", "triton", "numpy"),
    )  # fmt: skip
    write({**framed, "figures": figures}, options.out)
    return tests


if __name__ == "__main__":
    sys.exit(main())
