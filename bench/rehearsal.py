"""`python -m bench.rehearsal`: two layers of the real dimensions are converted, and the time is taken apart.

Hidden 2560, 512 experts of 640 per layer; vocabulary and n-gram table are scaled down. Written once in bf16 (fused
experts) and once in FP8 (an expert each, 128 x 128 scales), read cold. The conversion is stopped and let go in turns
with the quantiser alone, both with the same threads, so that whatever else the machine does hits both alike; the disk
is measured before and after. The share is the rate at which experts are written over that of the slower of the two.
Weights are drawn from a pool of random numbers: what they are changes nothing about the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoint import Stored, config_json, safetensors_header, stored
from bench.result import frame, write
from bench.tiny_model import Layout, TinyConfig, plan_tensors
from shared_experts.checkpoint import Checkpoint
from shared_experts.convert import convert
from shared_experts.expert_record import encode_expert
from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from shared_experts.quantiser import load_quantiser

REAL = TinyConfig(
    vocab_size=32_768, hidden_size=2560, num_hidden_layers=2, num_attention_heads=24, num_key_value_heads=2,
    head_dim=256, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=48, moe_intermediate_size=640, shared_expert_intermediate_size=640, num_experts_per_tok=10,
    num_experts=512, layer_types=("linear_attention", "full_attention"), hc_lowrank=320, ple_layer_ids=(1,),
    ple_embed_dim=2560, heads_per_ngram=8, ngram_vocab_size_base=100_000, indexer_n_heads=4, indexer_head_dim=128,
    indexer_budget=2048, mrope_section=(11, 11, 10), eos_token_id=1,
)  # fmt: skip
# the released model: 48 layers and a draft layer of 512 experts, 320,001,536 rows of 160, the rest in bf16
EXPERT_PARAMETERS, TABLE_PARAMETERS, DENSE_BYTES = 49 * 512 * 3 * 2560 * 640, 320_001_536 * 160, 11_200_000_000
RELEASED_TENSORS = {"bf16": 1_600, "fp8": 152_000}
BLOCK = 8 << 20
WINDOWS = 16


def drawn(tensor: Stored, pools: dict[str, np.ndarray], turn: int) -> np.ndarray:
    """Bytes for a tensor, out of the pool of its dtype from a place that depends on `turn`."""
    if tensor.dtype == "I64":
        return np.frombuffer(tensor.data(), np.uint8)
    kind = "scale" + tensor.dtype if tensor.name.endswith("_scale_inv") else tensor.dtype
    pool = pools[kind]
    start = turn * 4_099 * 8 % (len(pool) // 2)
    start -= start % 8
    return np.resize(pool[start:], tensor.bytes) if tensor.bytes > len(pool) - start else pool[start:][: tensor.bytes]


def number_pools() -> dict[str, np.ndarray]:
    """Random weights as the bytes of each dtype."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(16 << 20, np.float32)
    codes = random.integers(0, 256, 32 << 20, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    one = np.full(1 << 16, 2.0**-14, np.float32)
    return {
        "BF16": (normal * np.float32(0.02)).view(np.uint16)[1::2].copy().view(np.uint8),
        "F8_E4M3": codes,
        "scaleF32": one.view(np.uint8),
        "scaleBF16": one.view(np.uint16)[1::2].copy().view(np.uint8),
    }


def write_real(path: Path, dtype: str, config: TinyConfig) -> int:
    """A checkpoint of one file, synced and out of the page cache; returns its bytes."""
    path.mkdir()
    layout: Layout = "fused" if dtype == "bf16" else "per_expert"
    tensors = list(stored(plan_tensors(config, 0, layout, "model.", False), dtype))
    (path / "config.json").write_text(json.dumps(config_json(config, prefix="model.", dtype=dtype, mtp=False)))
    pools = number_pools()
    file = path / "model.safetensors"
    with file.open("wb") as out:
        out.write(safetensors_header(tensors))
        for turn, tensor in enumerate(tensors):
            out.write(drawn(tensor, pools, turn).data)
        out.flush()
        os.fsync(out.fileno())
    return file.stat().st_size


def forget(path: Path) -> None:
    """Drops a file's pages from memory, so that the next read is the disk's."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_rate(file: Path, threads: int, most: int) -> float:
    """Bytes per second of cold reads, `threads` beside each other."""
    forget(file)
    size = min(most, file.stat().st_size)
    descriptor = os.open(file, os.O_RDONLY)

    def read(start: int) -> int:
        return len(os.pread(descriptor, min(BLOCK, size - start), start))

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(0, size, BLOCK)))
    seconds = time.monotonic() - began
    os.close(descriptor)
    return total / seconds


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantised(layout: RecordLayout, threads: int, seconds: float) -> int:
    """How many experts are written from fp32 in memory in some seconds, by `threads` beside each other."""
    random = np.random.default_rng(1)
    gate_up = random.standard_normal((2 * layout.intermediate, layout.hidden), np.float32)
    down = random.standard_normal((layout.hidden, layout.intermediate), np.float32)
    quantise = load_quantiser().of(layout.format)
    began = time.monotonic()

    def work(_: int) -> int:
        for count in itertools.count(1):
            encode_expert(layout, gate_up, down, quantise)
            if time.monotonic() - began > seconds:
                return count
        raise AssertionError

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@dataclass(frozen=True, slots=True)
class Run:
    """What a conversion's own process knows of it."""

    tail_seconds: dict[str, float]  # of the sections after the experts
    peak_bytes: int
    header_bytes_per_tensor: int
    error: str


def converted(source: Path, target: Path, experts: str, threads: int, done: Any, answer: Connection) -> None:
    """A conversion in this process; `done` counts the bytes of expert records, a Run goes to `answer`."""
    before = _status("VmRSS")
    with Checkpoint.open(source) as checkpoint:
        opened = _status("VmRSS") - before
        tensors = sum(len(file.tensors) for file in checkpoint._files)
    seconds = {"dense": 0.0, "ngram": 0.0}
    last = time.monotonic()

    def note(what: str, at: int, total: int) -> None:
        nonlocal last
        kind, now = what.split(".")[0], time.monotonic()
        if kind == "experts":
            done.value = at
        elif kind in seconds:
            seconds[kind] += now - last
        last = now

    error = ""
    try:
        convert(source, target, experts=experts, threads=threads, progress=note)
    except Exception as failure:
        error = repr(failure)
    answer.send(Run(seconds, _status("VmHWM"), max(0, opened) // tensors, error))


@dataclass
class Turns:
    """Rates of windows in which the conversion ran, each between two in which the quantiser ran alone."""

    converting: list[float]  # bytes of records per second
    quantising: list[float]
    converting_cpu: list[float]  # the same per second of processor time
    quantising_cpu: list[float]
    seconds: float = 0.0  # that the conversion ran until the experts were written

    def shares(self) -> list[float]:
        """Every window over the mean of its neighbours."""
        pairs = itertools.pairwise(self.quantising)
        return [c / ((a + b) / 2) for c, (a, b) in zip(self.converting, pairs, strict=True)]


def in_turns(layout: RecordLayout, threads: int, window_s: float, child: BaseProcess, done: Any, total: int) -> Turns:
    """Lets the child run in WINDOWS turns with the quantiser, then until all experts are written."""
    assert child.pid is not None

    def alone() -> None:
        cpu, began = time.process_time(), time.monotonic()
        written = quantised(layout, threads, window_s) * layout.record_bytes
        turns.quantising.append(written / (time.monotonic() - began))
        turns.quantising_cpu.append(written / (time.process_time() - cpu))

    while not done.value and child.is_alive():  # imports and headers are no part of a window
        time.sleep(0.001)
    turns = Turns([], [], [], [])
    while True:
        os.kill(child.pid, signal.SIGSTOP)
        alone()
        first, cpu, began = done.value, cpu_seconds(child.pid), time.monotonic()
        os.kill(child.pid, signal.SIGCONT)
        last = len(turns.converting) == WINDOWS
        while done.value < total and child.is_alive() and (last or time.monotonic() - began < window_s):
            time.sleep(0.01)
        seconds = time.monotonic() - began
        turns.seconds += seconds
        if done.value >= total or not child.is_alive():
            return turns  # the last window is cut short by what follows the experts
        written = done.value - first
        turns.converting.append(written / seconds)
        turns.converting_cpu.append(written / max(0.01, cpu_seconds(child.pid) - cpu))


def source_bytes(config: TinyConfig, dtype: str) -> dict[str, int]:
    """Bytes of the checkpoint by the section they go to."""
    layout: Layout = "fused" if dtype == "bf16" else "per_expert"
    sizes = {"experts": 0, "ngram": 0, "dense": 0}
    for tensor in stored(plan_tensors(config, 0, layout, "model.", False), dtype):
        kind = "experts" if ".mlp.experts." in tensor.name else "ngram" if "ngram_emb" in tensor.name else "dense"
        sizes[kind] += tensor.bytes
    return sizes


def released(dtype: str, rates: dict[str, float], peak: int, per_tensor: int) -> dict[str, object]:
    """Time and memory for the whole model at the rates of the rehearsal."""
    width = 2 if dtype == "bf16" else 1
    sizes = {"experts": width * EXPERT_PARAMETERS, "ngram": width * TABLE_PARAMETERS, "dense": DENSE_BYTES}
    parts = {kind: size / rates[kind] for kind, size in sizes.items()}
    return {
        "source_bytes": sum(sizes.values()),
        "minutes": round(sum(parts.values()) / 60, 1),
        "minutes_by_section": {kind: round(s / 60, 1) for kind, s in parts.items()},
        "peak_bytes": peak + per_tensor * RELEASED_TENSORS[dtype],
    }


def rehearse(
    folder: Path, dtype: str, experts: str, threads: int, config: TinyConfig, window_s: float = 3.0
) -> dict[str, object]:
    """One dtype: write, then a conversion in turns with the quantiser, between two measurements of the disk."""
    source, target = folder / dtype, folder / f"{dtype}.pack"
    total = write_real(source, dtype, config)
    file, sizes = source / "model.safetensors", source_bytes(config, dtype)
    layout = RecordLayout.of(EXPERT_FORMATS[experts], config.hidden_size, config.moe_intermediate_size)
    records = config.num_experts * config.num_hidden_layers * layout.record_bytes
    per_record_byte = sizes["experts"] / records
    disk = [read_rate(file, threads + 1, 4 << 30)]
    forget(file)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    done = context.Value("q", 0, lock=False)
    child = context.Process(target=converted, args=(source, target, experts, threads, done, there))
    child.start()
    there.close()
    try:
        turns = in_turns(layout, threads, window_s, child, done, records)
        run: Run = here.recv()
        child.join()
    finally:
        child.kill()  # it may be stopped
    if run.error:
        raise RuntimeError(run.error)
    pack_bytes = sum(path.stat().st_size for path in target.iterdir())
    shutil.rmtree(target)
    disk.append(read_rate(file, threads + 1, 4 << 30))
    shutil.rmtree(source)
    quantiser = [rate * per_record_byte for rate in turns.quantising]
    if min(disk) < statistics.median(quantiser):
        shares = [rate * per_record_byte / statistics.mean(disk) for rate in turns.converting]
    else:
        shares = turns.shares()
    shares = shares or [0.0]  # a model so small that no window was whole
    reached = {
        "experts": sizes["experts"] / turns.seconds,
        "ngram": sizes["ngram"] / run.tail_seconds["ngram"],
        "dense": sizes["dense"] / run.tail_seconds["dense"],
    }
    quarters = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    return {
        "dtype": dtype,
        "checkpoint_bytes": total,
        "source_bytes": sizes,
        "pack_bytes": pack_bytes,
        "disk_read_bytes_per_s": [round(r) for r in disk],
        "quantiser_source_bytes_per_s_median": round(statistics.median(quantiser)),
        "reached_source_bytes_per_s": {kind: round(r) for kind, r in reached.items()},
        "slower": "disk" if min(disk) < statistics.median(quantiser) else "quantiser",
        "windows": len(shares),
        "share_of_slower_median": round(statistics.median(shares), 3),
        "share_of_slower_quartiles": [round(quarters[0], 3), round(quarters[-1], 3)],
        "peak_bytes": run.peak_bytes,
        "header_bytes_per_tensor": run.header_bytes_per_tensor,
        "share_of_quantiser_by_processor_time": round(
            statistics.median(turns.converting_cpu or [0.0]) / statistics.median(turns.quantising_cpu), 3
        ),
        "released_model": released(dtype, reached, run.peak_bytes, run.header_bytes_per_tensor),
    }


def main() -> None:
    """Both dtypes; one result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.rehearsal", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", choices=[f for f in EXPERT_FORMATS if f != "f32"], default="q4g64")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--window", type=float, default=3.0, help="seconds of each turn")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    needed = 17 << 30
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            parser.error(f"{needed >> 30} GiB of disk are needed, {free >> 30} are free")
        parts = []
        for dtype in chosen.dtypes:
            parts.append(rehearse(Path(name), dtype, chosen.experts, chosen.threads, REAL, chosen.window))
            print(json.dumps(parts[-1]), file=sys.stderr, flush=True)
    arguments = ["--experts", chosen.experts, "--dtypes", *chosen.dtypes, "--window", str(chosen.window)]
    result = frame(
        "bench.rehearsal",
        [*arguments, "--threads", str(chosen.threads), *(["--out", str(chosen.out)] if chosen.out else [])],
        pack={"experts": chosen.experts, "dense": "bf16", "hidden": 2560, "experts_per_layer": 512, "layers": 2},
        conditions={"threads": chosen.threads, "window_s": chosen.window, "checkpoint": "cold, one file, same disk"},
        packages=("numpy",),
    )
    write({**result, "parts": parts}, chosen.out)


if __name__ == "__main__":
    main()
