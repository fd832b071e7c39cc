"""`python -m bench.rehearsal`: two layers of the real dimensions are converted, and the time is taken apart.

Hidden 2560, 512 experts of 640 per layer; vocabulary and n-gram table are scaled down. Written once in bf16 (fused
experts) and once in FP8 (an expert each, 128 x 128 scales), read cold. In turns with the conversion stand what the
disk gives and what the quantiser alone takes, with the same threads. The share is the rate of the expert sections over
the slower of the two, in bytes of the checkpoint. Weights are drawn from a pool of random numbers: what they are
changes nothing about the time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

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


def quantiser_rate(layout: RecordLayout, threads: int, seconds: float) -> float:
    """Experts per second that are written from fp32 in memory, with `threads` beside each other."""
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
        done = sum(pool.map(work, range(threads)))
    return done / (time.monotonic() - began)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion."""

    seconds: float
    section_seconds: dict[str, float]
    pack_bytes: dict[str, int]
    peak_bytes: int
    header_bytes_per_tensor: int


def converted(source: Path, target: Path, experts: str, threads: int) -> Run:
    """One conversion in this process: seconds per kind of section, and memory."""
    before = _status("VmRSS")
    with Checkpoint.open(source) as checkpoint:
        opened = _status("VmRSS") - before
        tensors = sum(len(file.tensors) for file in checkpoint._files)
    seconds: dict[str, float] = {}
    bytes_out: dict[str, int] = {}
    last = [time.monotonic(), 0]

    def note(what: str, done: int, total: int) -> None:
        kind, now = what.split(".")[0], time.monotonic()
        seconds[kind] = seconds.get(kind, 0.0) + now - last[0]
        bytes_out[kind] = bytes_out.get(kind, 0) + done - int(last[1])
        last[:] = [now, done]

    began = time.monotonic()
    convert(source, target, experts=experts, threads=threads, progress=note)
    whole = time.monotonic() - began
    del bytes_out["manifest"], seconds["manifest"]
    return Run(round(whole, 2), seconds, bytes_out, _status("VmHWM"), max(0, opened) // tensors)


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
    folder: Path, dtype: str, experts: str, threads: int, config: TinyConfig, rounds: int, rate_seconds: float = 3.0
) -> dict[str, object]:
    """One dtype: write, then conversions in turns with the rates of the disk and of the quantiser."""
    source, target = folder / dtype, folder / f"{dtype}.pack"
    total = write_real(source, dtype, config)
    file, sizes = source / "model.safetensors", source_bytes(config, dtype)
    layout = RecordLayout.of(EXPERT_FORMATS[experts], config.hidden_size, config.moe_intermediate_size)
    per_expert = sizes["experts"] / (config.num_experts * config.num_hidden_layers)
    disk: list[float] = []
    quantiser: list[float] = []
    runs: list[Run] = []
    shares: list[float] = []

    def rates() -> None:
        disk.append(read_rate(file, threads + 1, 4 << 30))
        quantiser.append(quantiser_rate(layout, threads, rate_seconds) * per_expert)

    rates()
    for _ in range(rounds):
        forget(file)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
            runs.append(child.submit(converted, source, target, experts, threads).result())
        shutil.rmtree(target)
        rates()
        experts_rate = sizes["experts"] / runs[-1].section_seconds["experts"]
        slower = min(statistics.mean(disk[-2:]), statistics.mean(quantiser[-2:]))
        shares.append(experts_rate / slower)
    shutil.rmtree(source)
    reached = {kind: statistics.median(sizes[kind] / run.section_seconds[kind] for run in runs) for kind in sizes}
    peak, per_tensor = max(run.peak_bytes for run in runs), max(run.header_bytes_per_tensor for run in runs)
    return {
        "dtype": dtype,
        "checkpoint_bytes": total,
        "source_bytes": sizes,
        "disk_read_bytes_per_s": [round(r) for r in disk],
        "quantiser_source_bytes_per_s": [round(r) for r in quantiser],
        "reached_source_bytes_per_s": {kind: round(r) for kind, r in reached.items()},
        "share_of_slower": [round(s, 3) for s in shares],
        "share_of_slower_median": round(statistics.median(shares), 3),
        "runs": [asdict(run) for run in runs],
        "released_model": released(dtype, reached, peak, per_tensor),
    }


def main() -> None:
    """Both dtypes; one result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.rehearsal", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", choices=[f for f in EXPERT_FORMATS if f != "f32"], default="q4g64")
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    needed = 17 << 30
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            parser.error(f"{needed >> 30} GiB of disk are needed, {free >> 30} are free")
        parts = [
            rehearse(Path(name), dtype, chosen.experts, chosen.threads, REAL, chosen.rounds) for dtype in chosen.dtypes
        ]
    arguments = ["--experts", chosen.experts, "--dtypes", *chosen.dtypes, "--rounds", str(chosen.rounds)]
    result = frame(
        "bench.rehearsal",
        [*arguments, "--threads", str(chosen.threads), *(["--out", str(chosen.out)] if chosen.out else [])],
        pack={"experts": chosen.experts, "dense": "bf16", "hidden": 2560, "experts_per_layer": 512, "layers": 2},
        conditions={"threads": chosen.threads, "rounds": chosen.rounds, "checkpoint": "cold, one file, same disk"},
        packages=("numpy",),
    )
    write({**result, "parts": parts}, chosen.out)


if __name__ == "__main__":
    main()
