"""Routed experts of a decode window on a GPU: values first, then where the time goes, against what memory gives.

A region of random records at the true record size, a graph of every layer's experts, and the sources a miss can be read
through: by the link (the GPU reads pinned host memory), by the CPU (doorbell and done words), by both. Chosen experts
are drawn anew for each replay, a fixed number of them not resident. Everything is measured in one run, interleaved,
medians; the bound is bytes over the rates of the same run. Not here: dense layers, attention, a model (bench/decode).

    python setup.py -q build_ext --inplace; python -m bench.gpu_experts --out gpu_experts.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import bare_host
from bench.gpu_window import CHOSEN, HIDDEN, INNER, Bench, Records, Window, keep, medians
from bench.result import frame, write
from lanes.counters import Counters
from lanes.device import cuda
from lanes.experts.cache import ExpertCache, slots_of
from lanes.experts.gpu.doorbell import KernelWords, StreamWords
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.rates import CpuTimes, Rates
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
ALONE_ROUNDS = 200


def cpu_alone_us(kernel: ExpertKernel, first: int, info: ExpertsInfo) -> dict[int, float]:
    """Medians of the kernel's calls for one expert to ten of a row, with nothing beside."""
    home = np.uint64(first) + np.arange(info.layers * info.experts, dtype=np.uint64) * np.uint64(info.record_bytes)
    found: dict[int, float] = {}
    for count in (2, 3, 4, 6, CHOSEN):
        line = CpuTimes(kernel, home, count).measured(lambda rounds: rounds >= ALONE_ROUNDS)
        found.setdefault(1, round(line.start_us + line.each_us, 1))
        found[count] = round(line.start_us + count * line.each_us, 1)
    return found


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


class Report:
    """What was found so far: printed part by part, and kept in the file, so that it outlives what comes after."""

    def __init__(self, arguments: list[str], out: Path | None) -> None:
        self._arguments, self._out = arguments, out
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []
        self.pack: dict[str, object] = {}
        self.conditions: dict[str, object] = {"statistic": "interleaved medians"}

    def part(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Adds what `measure` finds; where it fails, says so and goes on, unless the device is lost."""
        began_s = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            self.failed.append(name)
            traceback.print_exc(limit=-4)
            found = {f"{name}: failed": f"{type(error).__name__}: {str(error)[:300]}"}
        self.figures |= found
        print(f"{name} [{time.perf_counter() - began_s:.1f} s]: {json.dumps(found)}", flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self.result(), indent=1) + "\n")
        torch.cuda.synchronize()

    def result(self) -> dict[str, Any]:
        """The whole, so far."""
        framed = frame(
            "bench.gpu_experts", self._arguments, pack=self.pack, conditions=self.conditions,
            packages=("torch", "triton", "numpy"),
        )  # fmt: skip
        return {**framed, "figures": self.figures, "failed": self.failed}


def bounded(result: dict[str, Any], layers: int, record_mb: float, hbm: float, rates: Rates) -> dict[str, Any]:
    """With the milliseconds that the same run's rates would take."""
    both = record_mb / rates.link_us + record_mb / rates.cpu_us  # TB/s
    hits = result["distinct_experts_a_layer"] - result["missed_a_layer"]
    bound = layers * (hits * record_mb / hbm + result["missed_a_layer"] * record_mb / (both * 1e3))
    return {**result, "bound_milliseconds_without_handshake": round(bound, 3)}


def climbed(bench: Bench, share: Share, rates: Rates, windows: int) -> dict[str, Any]:
    """The search for the split, from what was measured on."""
    share.search(rates)
    window, rng = Window(bench, 1, share), np.random.default_rng(23)
    sets, biases = [bench.ids(rng, 1, 0.25) for _ in range(SETS)], []
    share.on_split = lambda found: biases.append((found.bias, found.counts[:11].tolist()))
    times = [window.milliseconds(sets[number % SETS]) for number in range(windows)]
    return {
        "windows": windows, "found": biases[-3:], "first_100_ms": round(statistics.median(times[:100]), 3),
        "last_100_ms": round(statistics.median(times[-100:]), 3),
    }  # fmt: skip


def words(bench: Bench, share: Share, kind: type[StreamWords] | type[KernelWords], rounds: int) -> dict[str, Any]:
    """A window, a quarter of it the CPU's, with one kind of doorbell."""
    share.split(share.most)
    share.doorbell = kind(*share.words)
    window, rng = Window(bench, 1, share), np.random.default_rng(23)
    sets = [bench.ids(rng, 1, 0.25) for _ in range(SETS)]
    took = statistics.median(window.milliseconds(sets[number % SETS]) for number in range(rounds))
    return {f"a_quarter_by_cpu_ms_with_{kind.name}_words": round(took, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, measures, prints a line a part and one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=64, help="of a layer (default: %(default)s)")
    parser.add_argument("--resident", type=int, default=40, help="of a layer's experts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--climb", type=int, default=1500, help="windows of the search (default: %(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests/gpu first")
    parser.add_argument("--limit-s", type=float, default=540.0, help="ends then, whatever hangs (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    bare_host.stop_after(options.limit_s)
    report = Report(list(argv if argv is not None else sys.argv[1:]), options.out)
    if not options.no_tests:
        # Without the project's settings: they name plugins that a GPU host may not have.
        names = ["tests/gpu/test_gpu_cache.py", "tests/gpu/test_gpu_share.py"]
        settings = ["-q", "-c", os.devnull, "--rootdir", ".", "--durations=5"]
        began_s = time.perf_counter()
        report.part("tests", lambda: {"tests_exit": int(pytest.main([*settings, *names]))})
        bare_host.stop_after(options.limit_s - (time.perf_counter() - began_s))  # a test that fails calls it off
    device = cuda.start()
    cores = sorted(os.sched_getaffinity(0))
    engine_core, share_cores = cores_of(cores)
    layout = RecordLayout.of(EXPERT_FORMATS["q4g64"], HIDDEN, INNER)
    info = ExpertsInfo("q4g64", HIDDEN, INNER, options.layers, 0, options.experts, layout.record_bytes)
    report.pack = {
        "format": "q4g64", "layers": info.layers, "experts": info.experts, "hidden": HIDDEN, "intermediate": INNER,
    }  # fmt: skip
    report.conditions |= {"rounds": options.rounds, "resident_of_a_layer": options.resident}
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
    report.part("stands", lambda: {
        "device": device.name, "cores": len(cores), "filled_s": round(filled_s, 2),
        "pin_s": round(records.pinned.seconds, 2), "admitted_gb_s": round(budget / admitted_s / 1e9, 1),
    })  # fmt: skip
    os.sched_setaffinity(0, {engine_core})
    kernel = ExpertKernel(layout, cores=share_cores)
    refused: dict[str, str] = {}
    started = start_share(experts, cache, kernel, records.first, refused.__setitem__, core=share_cores[0])
    share, rates = started.share, started.rates
    by_rates, record_mb, hbm = share.counts, info.record_bytes / 1e6, hbm_gb_s()
    report.part("share", lambda: {
        "doorbell": share.doorbell.name, "refused": refused, "hbm_gb_s": round(hbm, 1),
        "rates_us": {name: round(value, 2) for name, value in asdict(rates).items()},
        "rates_gb_s": {name.removesuffix("_us"): round(record_mb * 1e3 / value, 1)
                       for name, value in asdict(rates).items() if name != "cpu_start_us" and value},
        "split_by_rates": by_rates[:11].tolist(),
    })  # fmt: skip
    report.part("CPU alone", lambda: {"cpu_alone_us_of_so_many": cpu_alone_us(kernel, records.first, info)})
    tables = {"link": share.most * 0, "cpu": share.most, "split by rates": by_rates}
    windows: list[dict[str, Any]] = []

    def at(rows: int, missing: float) -> dict[str, Any]:
        found = timed(bench, share, tables, rows, missing, options.rounds)
        windows.append(bounded(found, info.layers, record_mb, hbm, rates))
        handshake = windows[0]["milliseconds"]
        each_us = (handshake["link"] - handshake["link, no handshake"]) * 1e3 / info.layers
        return {"handshake_us_a_layer": round(each_us, 2), "windows": windows}

    for rows, missing in itertools.product((1, 4), (0.0, 0.25, 0.5)):
        report.part(f"{rows} rows, {missing} missing", partial(at, rows, missing))
    report.part("climb", lambda: {"climb": climbed(bench, share, rates, options.climb)})
    for kind in (StreamWords, KernelWords):
        report.part(f"{kind.name} words", partial(words, bench, share, kind, options.rounds))
    share.close()
    kernel.close()
    write(report.result(), options.out)
    return 1 if report.failed or report.figures.get("tests_exit") else 0


if __name__ == "__main__":
    sys.exit(main())
