"""A checkpoint becomes a pack: streamed, checked, and there only when it is whole.

Everything is written into a temporary sibling of the target, synced, and renamed in one step; a conversion that fails
removes it, and one that was killed is swept away by the next. A few experts (or some MiB of other weights) are in
memory at a time. Not here: what the bytes mean (`expert_record`, `manifest`) or reading (`checkpoint`).

Invariant: the target either does not exist or is a whole, synced pack.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shared_experts import limits
from shared_experts.checkpoint import Checkpoint, NgramSource, read_small
from shared_experts.codecs import F32Array, U8Array, bf16_from_f32
from shared_experts.errors import CheckpointError, NoSpace, OutputExists
from shared_experts.expert_record import Quantise, encode_expert
from shared_experts.layout import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, RecordLayout
from shared_experts.manifest import (
    DENSE_FILE,
    EXPERTS_FILE,
    FILE_NAME,
    NGRAM_FILE,
    ExpertsInfo,
    Manifest,
    NgramInfo,
    Section,
    encode,
    finished,
    ngram_pages,
)  # fmt: skip
from shared_experts.pack import Progress, dense_dtype
from shared_experts.pack_writer import SectionWriter
from shared_experts.quantiser import load_quantiser
from shared_experts.qwen4_exp import ARCHITECTURE
from shared_experts.temporary import TemporarySibling, sync_folder

T = TypeVar("T")
_SAFETENSORS_NAMES = {"bf16": "BF16", "f32": "F32"}
DATA_ALIGNMENT_BYTES = 64  # of the first dense tensor in its file


def convert(
    source: Path | str,
    target: Path | str,
    *,
    experts: str = DEFAULT_EXPERT_FORMAT.name,
    dense: str = "bf16",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Writes the pack `target` from the checkpoint directory `source` and returns its manifest.

    Raises OutputExists, CheckpointError, NoSpace or NativeMissing; then `target` does not exist.
    """
    target = Path(target)
    if dense not in _SAFETENSORS_NAMES:
        raise ValueError(f"dense is bf16 or f32, not {dense!r}")
    if experts not in EXPERT_FORMATS:
        raise ValueError(f"experts is one of {', '.join(EXPERT_FORMATS)}, not {experts!r}")
    if os.path.lexists(target):
        raise OutputExists(f"{target}: is already there; packs are never overwritten")
    with Checkpoint.open(source) as checkpoint:
        layout = _layout(checkpoint, experts)
        quantise = load_quantiser().of(layout.format) if layout.format.group else None
        conversion = _Conversion(checkpoint, layout, dense, quantise, threads or os.cpu_count() or 1, progress)
        conversion.check_space(target.parent)
        with TemporarySibling(target) as folder:
            manifest = conversion.write(folder)
            sync_folder(folder)
            try:
                os.rename(folder, target)
            except OSError as error:
                if os.path.lexists(target):
                    raise OutputExists(f"{target}: appeared while the pack was written") from error
                raise
        sync_folder(target.parent)
    return manifest


class _Conversion:
    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: RecordLayout,
        dense: str,
        quantise: Quantise | None,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._layout, self._dense = checkpoint, layout, dense
        self._quantise, self._threads, self._progress = quantise, threads, progress
        text = checkpoint.text
        self._experts = ExpertsInfo(
            layout.format.name, text.hidden, text.intermediate, checkpoint.expert_layers, checkpoint.draft_layers,
            text.experts, layout.record_bytes,
        )  # fmt: skip
        # tensors in f32 first: then every tensor starts on a multiple of its own element size
        shapes = {name: source.info.shape for name, source in checkpoint.dense.items()}
        self._dense_order = sorted(shapes, key=lambda name: (dense_dtype(shapes[name], dense) != "f32", name))
        self._dense_header = self._header(shapes)
        self._tables = tuple(self._place_tables())
        self._extra = {path.name: read_small(path, limits.EXTRA_FILE_BYTES) for path in checkpoint.extra_files()}
        self._total = self._experts.layers * text.experts * layout.record_bytes + len(self._dense_header)
        self._total += sum(self._written_bytes(shape) for shape in shapes.values())
        self._total += sum(table_bytes(table) for table in self._tables) + sum(map(len, self._extra.values()))

    def check_space(self, parent: Path) -> None:
        """Refuses a conversion that would not fit."""
        free = shutil.disk_usage(parent).free
        needed = self._total + (1 << 20)
        if needed > free:
            raise NoSpace(f"{parent}: the pack needs {needed} bytes, {free} are free")

    def write(self, folder: Path) -> Manifest:
        """Writes every file and returns the manifest."""
        sections: list[Section] = []
        writer = SectionWriter(folder, sections, self._total, self._progress)
        with writer.file(EXPERTS_FILE):
            self._write_experts(writer)
        with writer.file(DENSE_FILE), writer.section("dense"):
            self._write_dense(writer)
        if self._tables:
            with writer.file(NGRAM_FILE):
                for table in self._tables:
                    with writer.section(f"ngram.{table.layer}"):
                        self._write_table(writer, table, self._checkpoint.ngram[table.layer])
        for name, data in self._extra.items():
            with writer.file(name), writer.section(f"file.{name}"):
                writer.write(data)
        name = "".join(c if c.isprintable() else "?" for c in self._checkpoint.path.resolve().name)
        manifest = finished(
            Manifest(
                name=name.encode()[:256].decode(errors="ignore") or "model",
                architecture=ARCHITECTURE,
                config=self._checkpoint.config,
                experts=self._experts,
                dense_dtype=self._dense,
                ngram=self._tables,
                sections=tuple(sections),
                fingerprint=b"",
                created_by=f"expressway {importlib.metadata.version('expressway')}",
            )
        )
        with writer.file(FILE_NAME):
            writer.write(encode(manifest))
        return manifest

    def _write_experts(self, writer: SectionWriter) -> None:
        """Workers read and encode ahead of the writer, at most one expert each and one waiting."""
        count = self._experts.experts
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                numbers = itertools.product(range(self._experts.layers), range(count))
                records = _in_order(pool, self._record, numbers, self._threads + 1)
                for layer in range(self._experts.layers):
                    with writer.section(f"experts.{layer}"):
                        for record in itertools.islice(records, count):
                            writer.write(record.data)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _record(self, number: tuple[int, int]) -> U8Array:
        layer, expert = number
        gate_up, down = self._checkpoint.read_expert(layer, expert)
        try:
            return encode_expert(self._layout, gate_up, down, self._quantise)
        except ValueError as error:
            raise self._checkpoint.expert_source(layer, expert).error(f"expert {expert}: {error}") from None

    def _header(self, shapes: dict[str, tuple[int, ...]]) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in self._dense_order:
            end = position + self._written_bytes(shapes[name])
            dtype = _SAFETENSORS_NAMES[dense_dtype(shapes[name], self._dense)]
            entries[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [position, end]}
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
        return len(text).to_bytes(8, "little") + text

    def _written_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * (2 if dense_dtype(shape, self._dense) == "bf16" else 4)

    def _write_dense(self, writer: SectionWriter) -> None:
        writer.write(self._dense_header)
        for name in self._dense_order:
            source = self._checkpoint.dense[name]
            dtype = dense_dtype(source.info.shape, self._dense)
            for values in _ahead(source.blocks()):
                writer.write(_encode(values, dtype, source.error).data)

    def _place_tables(self) -> Iterator[NgramInfo]:
        offset = 0
        for layer, source in sorted(self._checkpoint.ngram.items()):
            row_bytes, rows_per_page, page_bytes = ngram_pages(source.columns, self._dense)
            constants = source.constants
            info = NgramInfo(
                layer, source.rows, source.columns, self._dense, offset, row_bytes, rows_per_page, page_bytes,
                constants.multipliers, constants.head_offsets, constants.head_vocab_sizes,
            )  # fmt: skip
            yield info
            offset += table_bytes(info)

    def _write_table(self, writer: SectionWriter, table: NgramInfo, source: NgramSource) -> None:
        used = table.rows_per_page * table.row_bytes  # of a page
        waiting = np.empty(0, np.uint8)  # rows that do not fill a page yet
        for part in source.parts:
            for values in _ahead(part.blocks(table.columns)):
                waiting = np.concatenate([waiting, _encode(values, table.dtype, part.error)])
                pages = len(waiting) // used
                writer.write(_pages(waiting[: pages * used], used, table.page_bytes).data)
                waiting = waiting[pages * used :].copy()
        if len(waiting):
            last = np.zeros(used, np.uint8)
            last[: len(waiting)] = waiting
            writer.write(_pages(last, used, table.page_bytes).data)


def table_bytes(table: NgramInfo) -> int:
    """Bytes that an n-gram table takes in its file."""
    return -(-table.rows // table.rows_per_page) * table.page_bytes


def _pages(rows: U8Array, used: int, page_bytes: int) -> U8Array:
    pages = np.zeros((len(rows) // used, page_bytes), np.uint8)
    pages[:, :used] = rows.reshape(-1, used)
    return pages.reshape(-1)


def _encode(values: F32Array, dtype: str, error: Callable[[str], CheckpointError]) -> U8Array:
    if dtype == "f32":
        return values.astype("<f4", copy=False).view(np.uint8)
    try:
        bits: npt.NDArray[np.uint16] = bf16_from_f32(values)
    except ValueError as reason:
        raise error(str(reason)) from None
    return bits.astype("<u2", copy=False).view(np.uint8)


def _layout(checkpoint: Checkpoint, name: str) -> RecordLayout:
    text = checkpoint.text
    try:
        return RecordLayout.of(EXPERT_FORMATS[name], text.hidden, text.intermediate)
    except ValueError as error:
        fitting = [
            f.name for f in EXPERT_FORMATS.values()
            if f.group and not text.hidden % f.group and not text.intermediate % f.group
        ]  # fmt: skip
        advice = f"{fitting[-1]} fits" if fitting else "no quantised format fits; f32 does"
        raise CheckpointError(checkpoint.path / "config.json", f"{error}; {advice}") from None


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[tuple[int, int]], U8Array], items: Iterator[tuple[int, int]], most: int
) -> Iterator[U8Array]:
    """Results in the order of the items, with at most `most` begun or waiting."""
    running: deque[Future[U8Array]] = deque()
    for item in items:
        running.append(pool.submit(work, item))
        if len(running) >= most:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by a second thread while the caller uses the one before."""
    done = object()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, items, done)
        while (item := waiting.result()) is not done:
            waiting = pool.submit(next, items, done)
            yield item  # type: ignore[misc]
