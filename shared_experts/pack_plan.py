"""What a pack will consist of, before a byte of it is written: every section, its place, and its bytes step by step.

A step reads its part of the checkpoint and returns its part of the section; it depends on nothing but its number, so
steps can be made beside each other and a section can be made again. Not here: running them (`pack_writer`).

Invariant: the plan of one checkpoint and one choice of formats is always the same, and the steps of a section have
exactly its bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shared_experts import limits
from shared_experts.checkpoint import Checkpoint, read_small
from shared_experts.codecs import U8Array
from shared_experts.expert_record import Quantise, encode_rows
from shared_experts.layout import RecordLayout
from shared_experts.manifest import DENSE_FILE, EXPERTS_FILE, NGRAM_FILE, ExpertsInfo, NgramInfo, ngram_pages
from shared_experts.pack import dense_dtype
from shared_experts.tensor_source import NgramSource, Source

_SAFETENSORS_NAMES = {"bf16": "BF16", "f32": "F32"}
CACHED_VALUES = 256 << 10  # weights of an expert that are in hand at a time: 1 MiB in fp32
DATA_ALIGNMENT_BYTES = 64  # of the first dense tensor in its file


@dataclass(frozen=True, slots=True)
class PlannedSection:
    """A section to write: `step(0)` .. `step(steps - 1)`, one after another, are its bytes."""

    name: str
    file: str
    offset: int
    bytes: int
    steps: int
    step: Callable[[int], U8Array]


class PackPlan:
    """The plan of one conversion."""

    def __init__(self, checkpoint: Checkpoint, layout: RecordLayout, dense: str, quantise: Quantise | None) -> None:
        self._checkpoint, self._layout, self._dense, self._quantise = checkpoint, layout, dense, quantise
        text = checkpoint.text
        self.experts = ExpertsInfo(
            layout.format.name, text.hidden, text.intermediate, checkpoint.expert_layers, checkpoint.draft_layers,
            text.experts, layout.record_bytes,
        )  # fmt: skip
        self.tables = tuple(self._place_tables())
        self.sections = (*self._expert_sections(), self._dense_section(), *self._table_sections(), *self._files())
        self.total_bytes = sum(section.bytes for section in self.sections)

    def _expert_sections(self) -> Iterator[PlannedSection]:
        size = self.experts.experts * self.experts.record_bytes
        for layer in range(self.experts.layers):
            step = functools.partial(self._record, layer)
            yield PlannedSection(f"experts.{layer}", EXPERTS_FILE, layer * size, size, self.experts.experts, step)

    def _record(self, layer: int, expert: int) -> U8Array:
        """Block of rows after block, each widened and encoded while it is in the processor's cache."""
        record = np.zeros(self._layout.record_bytes, np.uint8)
        for matrix, first, source, start, rows in self._checkpoint.expert_runs(layer, expert):
            columns = self._layout.intermediate if matrix else self._layout.hidden
            step = max(1, CACHED_VALUES // columns)
            for at, values in source.pieces(start, rows * columns, step * columns):
                row = at // columns
                try:
                    encode_rows(self._layout, record, matrix, first + row, values.reshape(-1, columns), self._quantise)
                except ValueError as error:
                    raise source.error(f"expert {expert}, from row {row}: {error}") from None
        return record

    def _dense_section(self) -> PlannedSection:
        sources = self._checkpoint.dense
        # tensors in f32 first: then every tensor starts on a multiple of its own element size
        dtypes = {name: dense_dtype(source.info.shape, self._dense) for name, source in sources.items()}
        order = sorted(sources, key=lambda name: (dtypes[name] != "f32", name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        runs: list[tuple[Source, str, int, int]] = []
        for name in order:
            source, dtype = sources[name], dtypes[name]
            end = position + source.elements * (2 if dtype == "bf16" else 4)
            shape = source.info.shape
            entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
            runs += [(source, dtype, start, count) for start, count in source.steps()]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
        header = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)

        def step(number: int) -> U8Array:
            return _encoded(*runs[number - 1]) if number else header

        return PlannedSection("dense", DENSE_FILE, 0, len(header) + position, 1 + len(runs), step)

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
            offset += info.table_bytes

    def _table_sections(self) -> Iterator[PlannedSection]:
        for table in self.tables:
            source = self._checkpoint.ngram[table.layer]
            step_pages = max(1, limits.BLOCK_BYTES // 8 // table.page_bytes)
            for name, offset, size in table.parts():
                first, count = (offset - table.offset) // table.page_bytes, size // table.page_bytes
                step = functools.partial(_pages, table, source, first, first + count, step_pages)
                yield PlannedSection(name, NGRAM_FILE, offset, size, -(-count // step_pages), step)

    def _files(self) -> Iterator[PlannedSection]:
        for path in self._checkpoint.extra_files():
            data = np.frombuffer(read_small(path, limits.EXTRA_FILE_BYTES), np.uint8)
            yield PlannedSection(f"file.{path.name}", path.name, 0, len(data), 1, functools.partial(_whole, data))


def _whole(data: U8Array, _: int) -> U8Array:
    return data


def _encoded(source: Source, dtype: str, start: int, count: int) -> U8Array:
    values = source.read_bf16(start, count) if dtype == "bf16" else source.read(start, count)
    return values.view(np.uint8)


def _pages(table: NgramInfo, source: NgramSource, first: int, end: int, step: int, number: int) -> U8Array:
    """Step `number`, of `step` pages, of the pages first..end-1 of a table."""
    first += number * step
    end = min(end, first + step)
    rows = min(table.rows, end * table.rows_per_page) - first * table.rows_per_page
    used = table.rows_per_page * table.row_bytes  # of a page
    lines = np.zeros((end - first) * used, np.uint8)
    at = 0
    for part, row, count in source.runs(first * table.rows_per_page, first * table.rows_per_page + rows):
        values = _encoded(part, table.dtype, row * table.columns, count * table.columns)
        lines[at : at + len(values)] = values
        at += len(values)
    assert at == rows * table.row_bytes
    pages = np.zeros((end - first, table.page_bytes), np.uint8)
    pages[:, :used] = lines.reshape(-1, used)
    return pages.reshape(-1)
