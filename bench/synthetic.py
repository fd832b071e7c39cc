"""A region of random experts at the true size, made in memory without a pack, for measuring lanes on any host.

Records have the layout of a real pack's: codes are random, scales make an expert's output about as large as its input,
so that activations stay lively and finite. They come from one random block, read at another place and mixed with
another word for each record: faster than drawing 64 GB, and no two records are equal. Not here: dense weights, and
routing, which the frozen traces give (bench.traces).

Invariant: the bytes depend on format, sizes and seed only, not on threads. What comes back is a region like an owner's:
sealed, read-only, with its digests.

    python -m bench.synthetic --threads 16
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from bench.result import frame, write
from bench.traces import synthetic as traces
from shared_experts import memfd
from shared_experts.fill import SealedRegion
from shared_experts.layout import EXPERT_FORMATS, REGION_HEADER_BYTES, REGION_STATE_OFFSET, RecordLayout
from shared_experts.region import GENERATION_BYTES, READY_WORD, RegionHeader, RegionShape

LAYERS, EXPERTS, HIDDEN, INNER = 48, 512, 2560, 640
BLOCK_WORDS = 8 << 20  # 64 MiB: a record of 2.6 MB starts at one of millions of places in it
HOTTEST = 0.1  # of the (layer, expert) pairs

Words = npt.NDArray[np.uint64]


def fill(
    layout: RecordLayout, layers: int, experts: int, *, seed: int, threads: int
) -> tuple[SealedRegion, RegionShape]:
    """The region and what it is; the descriptor is the caller's to close. Raises RegionError without the memory."""
    record_bytes = layout.record_bytes
    memory = memfd.create(REGION_HEADER_BYTES + layers * experts * record_bytes)
    try:
        whole = np.frombuffer(memory.map, np.uint8)
        block = np.random.Generator(np.random.Philox(seed)).integers(
            0, 1 << 64, max(BLOCK_WORDS, record_bytes // 8), np.uint64
        )

        def one(layer: int, view: npt.NDArray[np.uint8]) -> bytes:
            digest = hashlib.sha256()
            for key in range(layer * experts, (layer + 1) * experts):
                start = REGION_HEADER_BYTES + key * record_bytes
                record = view[start : start + record_bytes]
                _record(layout, record, block, key)
                digest.update(record.data)
            return digest.digest()

        with ThreadPoolExecutor(threads) as pool:
            digests = tuple(pool.map(one, range(layers), itertools.repeat(whole)))
        fingerprint = hashlib.sha256(b"".join(digests)).digest()
        shape = RegionShape(
            fingerprint, layout.format.id, layout.hidden, layout.intermediate, layers, experts, record_bytes, digests
        )
        header = RegionHeader.of(shape, os.urandom(GENERATION_BYTES), os.getpid())
        encoded = np.frombuffer(header.encode(), np.uint8)
        whole[: len(encoded)] = encoded
        whole[REGION_STATE_OFFSET : REGION_STATE_OFFSET + 8] = np.frombuffer(READY_WORD, np.uint8)
        del whole  # the map cannot be closed while a view of it lives
    except BaseException:
        memory.discard()
        raise
    return SealedRegion(memfd.seal(memory), header, memory.page_bytes), shape


def _record(layout: RecordLayout, record: npt.NDArray[np.uint8], block: Words, key: int) -> None:
    """Fills one record; every page of it is written here, by the thread that will have it near."""
    words = record.view(np.uint64)
    mixed = _mix(key)
    start = mixed % (len(block) - len(words) + 1)
    np.bitwise_xor(block[start : start + len(words)], np.uint64(_mix(key + (1 << 40))), out=words)
    hidden, inner, group = layout.hidden, layout.intermediate, layout.format.group
    level = {4: 4.6, 8: 74.0}[layout.format.bits]  # root mean square of a random code
    for first, rows, columns in ((layout.gate_up_scales, 2 * inner, hidden), (layout.down_scales, hidden, inner)):
        scales = record[first : first + 2 * rows * (columns // group)].view(np.uint16)
        # 1 to 2 times a base that makes a dot of normal numbers about normal: the random low bits of an fp16.
        base = np.float16(2.0 ** math.floor(math.log2(1.5 / (level * math.sqrt(columns)))))
        np.bitwise_and(scales, np.uint16(0x3FF), out=scales)
        np.bitwise_or(scales, base.view(np.uint16), out=scales)
    record[layout.down_scales + 2 * hidden * (inner // group) :] = 0
    if layout.format.bits == 8:  # the one code that no converter writes
        codes = record[: layout.gate_up_scales].view(np.int8)
        np.maximum(codes, np.int8(-127), out=codes)


def _mix(value: int) -> int:
    """splitmix64."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def skew(name: str, share: float = HOTTEST) -> float:
    """Share of a frozen trace's accesses that its hottest pairs take, after checking its digest."""
    windows = list(traces.trace(name))
    if traces.digest(windows) != traces.DIGESTS[name]:
        raise SystemExit(f"{name}: the generator no longer makes the frozen trace")
    uses = np.zeros(traces.LAYERS * traces.EXPERTS, np.int64)
    for window in windows:
        uses[window.keys] += window.counts
    hottest = np.sort(uses)[::-1][: int(share * len(uses))]
    return float(hottest.sum() / uses.sum())


def main(argv: Sequence[str] | None = None) -> int:
    """Fills a region, prints one JSON object, and lets it go."""
    parser = argparse.ArgumentParser(prog="python -m bench.synthetic", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--format", choices=("q4g64", "q4g32", "q8"), default="q4g64")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--intermediate", type=int, default=INNER)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", choices=tuple(traces.RECIPES), default="conversation", help="whose skew is printed")
    options = parser.parse_args(argv)
    layout = RecordLayout.of(EXPERT_FORMATS[options.format], options.hidden, options.intermediate)
    began, began_cpu = time.perf_counter(), time.process_time()
    region, shape = fill(layout, options.layers, options.experts, seed=options.seed, threads=options.threads)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    os.close(region.fd)
    result = frame(
        "bench.synthetic", list(argv if argv is not None else sys.argv[1:]),
        pack={"format": options.format, "layers": options.layers, "experts": options.experts,
              "hidden": options.hidden, "intermediate": options.intermediate, "fingerprint": shape.fingerprint.hex()},
        conditions={"threads": options.threads, "page_bytes": region.page_bytes},
        packages=("numpy",),
    )  # fmt: skip
    figures = {
        "bytes": shape.total_bytes, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2),
        "gb_per_s": round(shape.total_bytes / seconds / 1e9, 2),
        "trace": options.trace, "hottest_tenth_takes": round(skew(options.trace), 3),
    }  # fmt: skip
    write({**result, "figures": figures}, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
