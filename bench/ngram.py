"""The n-gram row reader against the disk itself: rows per second, time per token, cache hits.

A table of the released model's row shape is written to a real disk and dropped from the page cache. The disk's own
rate is measured in the same run by threads that do nothing but read random pages at the same depth; the two take turns
and ratios are medians over rounds. Not here: a model. Invariant: the file is removed whatever happens.

Letters: T tokens, N rows per token.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.result import frame, write
from shared_experts.manifest import PAGE_BYTES, NgramInfo, ngram_pages
from shared_experts.row_reader import DEFAULT_CACHE_BYTES, DEFAULT_DEPTH, RowReader, read_pages

COLUMNS, DTYPE, ROWS_PER_TOKEN = 160, "bf16", 16
CHUNK_TOKENS = 256  # prompt rows per window of a lane
SEED = 20
ZIPF_EXPONENTS = (0.0, 0.8, 1.0, 1.2)  # 0: uniform
PRIME = 2654435761  # spreads frequent rows over the table; divides no number of rows that fits here
WORK_S = 1e-3  # between asking for a token's rows and needing them, where that is measured

Ids = npt.NDArray[np.int64]


def make_table(path: Path, gib: float) -> NgramInfo:
    """Random bytes, on the disk and out of the page cache."""
    row_bytes, rows_per_page, page_bytes = ngram_pages(COLUMNS, DTYPE)
    pages = int(gib * (1 << 30)) // page_bytes
    random = np.random.default_rng(SEED)
    with path.open("wb") as file:
        left = pages * page_bytes
        while left:
            size = min(left, 64 << 20)
            file.write(random.bytes(size))
            left -= size
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rows = pages * rows_per_page
    return NgramInfo(1, rows, COLUMNS, DTYPE, 0, row_bytes, rows_per_page, page_bytes, (1,), (0,), (rows,))


class Disk:
    """The device by itself: random pages of the table, and nothing else done with them."""

    def __init__(self, path: Path, info: NgramInfo, direct: bool, random: np.random.Generator) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        self._pages, self._random = info.rows // info.rows_per_page, random

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def read(self, count: int, depth: int) -> tuple[float, Ids]:
        """(pages per second, nanoseconds of each read)."""
        offsets = self._random.integers(0, self._pages, count) * PAGE_BYTES
        began_s = time.perf_counter()
        took_ns = read_pages(self._descriptor, offsets, PAGE_BYTES, depth)
        return count / (time.perf_counter() - began_s), took_ns

    def drop_cache(self) -> None:
        """Forgets what buffered reads left in memory."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def prompt_rate(reader: RowReader, ids: Ids) -> tuple[float, float]:
    """(rows, pages read) per second of ids [T, N] in chunks, the next one prefetched before each is asked for."""
    chunks = [ids[t : t + CHUNK_TOKENS].ravel() for t in range(0, len(ids), CHUNK_TOKENS)]
    before, began_s = reader.counters().reads, time.perf_counter()
    reader.prefetch(chunks[0])
    for chunk, following in zip(chunks, [*chunks[1:], chunks[0][:0]], strict=True):
        reader.prefetch(following)
        reader.rows(chunk)
    took_s = time.perf_counter() - began_s
    return ids.size / took_s, (reader.counters().reads - before) / took_s


def token_times_us(reader: RowReader, ids: Ids, work_s: float) -> list[float]:
    """Microseconds that each token of ids [T, N] waited for its rows, `work_s` after they were asked for."""
    times = []
    for token in ids:
        if work_s:
            reader.prefetch(token)
            time.sleep(work_s)
        began_ns = time.perf_counter_ns()
        reader.rows(token)
        times.append((time.perf_counter_ns() - began_ns) / 1e3)
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    """p50 and p99."""
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def zipf_ids(random: np.random.Generator, rows: int, exponent: float, tokens: int) -> Ids:
    """ids [T, N]: the k-th most frequent row has weight k ** -exponent; which row that is, is random."""
    ranks = np.searchsorted(_cumulated(rows, exponent), random.random(tokens * ROWS_PER_TOKEN))
    ids: Ids = ((ranks * PRIME + 1) % rows).reshape(tokens, ROWS_PER_TOKEN)  # a permutation of the table's rows
    return ids


def _cumulated(rows: int, exponent: float) -> npt.NDArray[np.float64]:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    total: npt.NDArray[np.float64] = np.cumsum(weights)
    total /= total[-1]
    return total


def prompts(reader: RowReader, disk: Disk, random: np.random.Generator, rounds: int, tokens: int) -> dict[str, object]:
    """Uniform ids, so that nearly every row is a read; the disk by itself takes turns with it."""
    found = []
    for _ in range(rounds):
        ids = random.integers(0, reader.info.rows, (tokens, ROWS_PER_TOKEN))
        found.append((*prompt_rate(reader, ids), disk.read(ids.size, DEFAULT_DEPTH)[0]))
    shares = [pages / alone for _, pages, alone in found]
    return {
        "rows_per_s": round(statistics.median(rows for rows, _, _ in found)),
        "pages_per_s": round(statistics.median(pages for _, pages, _ in found)),
        "disk_pages_per_s": round(statistics.median(alone for _, _, alone in found)),
        "share_of_disk": round(statistics.median(shares), 3),
        "share_of_disk_by_round": [round(share, 3) for share in shares],
    }


def single_tokens(reader: RowReader, disk: Disk, random: np.random.Generator, count: int) -> dict[str, object]:
    """How long a decode step waits, beside what the disk needs for as many pages."""
    ids = random.integers(0, reader.info.rows, (2, count, ROWS_PER_TOKEN))
    alone_ns = disk.read(count, 1)[1]
    together_ns = disk.read(count * ROWS_PER_TOKEN, ROWS_PER_TOKEN)[1].reshape(count, ROWS_PER_TOKEN)
    return {
        "rows": ROWS_PER_TOKEN,
        "asked_when_needed": spread(token_times_us(reader, ids[0], 0.0)),
        f"asked_{WORK_S * 1e3:.0f}_ms_before": spread(token_times_us(reader, ids[1], WORK_S)),
        "disk_one_page_alone": spread((alone_ns / 1e3).tolist()),
        "disk_slowest_of_16_at_depth_16": spread((together_ns.max(1) / 1e3).tolist()),
    }


def cached(reader: RowReader, exponent: float, random: np.random.Generator, tokens: int) -> dict[str, float]:
    """A warm cache under ids of one skew (0: uniform), beside the best that a fixed set of rows could do."""
    rows, capacity = reader.info.rows, reader.counters().capacity_rows
    prompt_rate(reader, zipf_ids(random, rows, exponent, 8 * capacity // ROWS_PER_TOKEN))
    before = reader.counters()
    rate, _ = prompt_rate(reader, zipf_ids(random, rows, exponent, tokens))
    after = reader.counters()
    return {
        "without_read": round(1 - (after.reads - before.reads) / (after.asked - before.asked), 4),
        "best_fixed_set": round(float(_cumulated(rows, exponent)[capacity - 1]), 4),
        "rows_per_s": round(rate),
    }


def measure(path: Path, gib: float, rounds: int, tokens: int, cache_bytes: int) -> dict[str, object]:
    """Everything, on one table."""
    random = np.random.default_rng(SEED + 1)
    info = make_table(path, gib)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        disk, buffered = Disk(path, info, True, random), Disk(path, info, False, random)
        stack.callback(disk.close)
        stack.callback(buffered.close)

        def reader() -> RowReader:
            return stack.enter_context(RowReader(descriptor, info, path, cache_bytes=cache_bytes))

        plain = reader()
        result: dict[str, object] = {
            "table_bytes": int(gib * (1 << 30)),
            "rows": info.rows,
            "mode": plain.mode,
            "prompt": prompts(plain, disk, random, rounds, tokens),
            "token": single_tokens(plain, disk, random, 200 * rounds),
            "disk_pages_per_s_by_depth": {
                str(depth): round(disk.read(tokens * ROWS_PER_TOKEN, depth)[0]) for depth in (1, 8, 16, 32, 64, 128)
            },
        }
        buffered.drop_cache()
        result["buffered_pages_per_s"] = round(buffered.read(tokens * ROWS_PER_TOKEN, DEFAULT_DEPTH)[0])
        streams = {str(exponent): cached(reader(), exponent, random, tokens) for exponent in ZIPF_EXPONENTS}
        result["cache"] = {
            "bytes": cache_bytes, "rows": plain.counters().capacity_rows, "by_zipf_exponent": streams,
        }  # fmt: skip
        return result


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the table, measures, removes it, prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.ngram", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096, help="of one round")
    parser.add_argument("--cache-mib", type=int, default=DEFAULT_CACHE_BYTES >> 20)
    parser.add_argument("--folder", type=Path, help="where the table is written (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(
            Path(folder) / "ngram.bin", options.gib, options.rounds, options.tokens, options.cache_mib << 20
        )
    result = frame(
        "bench.ngram",
        list(argv if argv is not None else sys.argv[1:]),
        pack={"columns": COLUMNS, "dtype": DTYPE, "values": "random bytes"},
        conditions={
            "rounds": options.rounds, "tokens": options.tokens, "depth": DEFAULT_DEPTH, "chunk_tokens": CHUNK_TOKENS,
            "page_cache": "dropped; reads are O_DIRECT where mode says direct", "seed": SEED,
        },
        packages=("numpy",),
    )  # fmt: skip
    write({**result, **found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
