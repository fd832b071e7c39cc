"""Pages of a seated state, put together in the device's memory as the pool has them, and taken apart again.

Many whole pages at once: a copy for every buffer of every layer, however many pages. Not here: staging, copies between
device and host (carrier). Invariant: the bytes are those of `snapshot.pack`.

Letters: N pages, H heads (1: none), R rows of a page, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lanes.state.carrier import Part, Rows, Segments
from shared_experts.park_memory import ParkMemory

Runs = list[tuple[int, int]]


def groups(items: Sequence[tuple[Part, Segments]], most_bytes: int) -> Iterator[list[tuple[Part, Segments]]]:
    """The same in order, as many together as that many bytes have room for; a larger one alone."""
    group: list[tuple[Part, Segments]] = []
    size_bytes = 0
    for item in items:
        if group and size_bytes + item[0].size_bytes > most_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += item[0].size_bytes
    if group:
        yield group


def gather(memory: torch.Tensor, parts: Sequence[Part]) -> None:
    """Parts, end to end, into memory uint8."""
    for part, count, at in _steps(parts):
        if count:
            assert isinstance(part, Rows)
            for there, here in _views(memory, at, part, count):
                there.copy_(here)
            continue
        for tensor in part.tensors():
            memory[at : at + tensor.nbytes].copy_(tensor.contiguous().flatten().view(torch.uint8))
            at += tensor.nbytes


def scatter(memory: torch.Tensor, parts: Sequence[Part], pool: ParkMemory, runs: Sequence[Runs]) -> None:
    """The way back. Tensors in host memory are filled from `runs` of the pool, which has the same bytes."""
    number = 0
    for part, count, at in _steps(parts):
        if count:
            assert isinstance(part, Rows)
            for there, here in _views(memory, at, part, count):
                here.copy_(there)
        elif isinstance(part, Rows):
            stop = min(part.end, part.until)
            into = part.state.rows(part.first, stop)
            for (size, dtype), rows in zip(part.state.shape.row_shapes(part.first, part.end), into, strict=True):
                piece = memory[at : at + dtype.itemsize * _elements(size)].clone()  # aligned
                rows.copy_(piece.view(dtype).view(size)[..., : rows.shape[-2], :])
                at += piece.shape[0]
        else:
            begin = at
            for tensor in part.of:
                source = memory[at : at + tensor.nbytes]
                if tensor.device != memory.device:
                    source = torch.from_numpy(_read(pool, runs[number], at - begin, tensor.nbytes))
                tensor.flatten().view(torch.uint8).copy_(source)
                at += tensor.nbytes
        number += count or 1


def _steps(parts: Sequence[Part]) -> Iterator[tuple[Part, int, int]]:
    """(first part, how many pages after one another that go together or 0, where they begin)."""
    number = at = 0
    while number < len(parts):
        count = 0 if at % 8 else _together(parts[number:])
        yield parts[number], count, at
        for part in parts[number : number + (count or 1)]:
            at += part.size_bytes
            number += 1


def _together(parts: Sequence[Part]) -> int:
    """How many of the first are whole pages that lie side by side, of one size; 0 where they are not aligned."""
    first, count = parts[0], 0
    if not isinstance(first, Rows):
        return 0
    length, at = first.end - first.first, 0
    for attention in first.state.attention.values():
        for each in attention.shape.growing():
            if first.first % each.tokens or length % each.tokens or at % each.dtype.itemsize:
                return 0
            at += each.row_bytes() * (length // each.tokens)
    if at % 8:
        return 0
    for part in parts:
        begin = first.first + count * length
        if not isinstance(part, Rows) or part.state is not first.state or part.until < part.end:
            break
        if (part.first, part.end) != (begin, begin + length):
            break
        count += 1
    return count


def _views(memory: torch.Tensor, at: int, first: Rows, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """[N, H, R, W] twice for every buffer: in memory, and in the state. By strides: it is done for every batch."""
    length, page_bytes, column = first.end - first.first, first.size_bytes, 0
    flat = memory[at : at + count * page_bytes]
    typed: dict[torch.dtype, torch.Tensor] = {}
    for attention in first.state.attention.values():
        for each in attention.shape.growing():
            dtype = each.dtype
            if (table := typed.get(dtype)) is None:
                table = typed[dtype] = flat.view(dtype)
            rows, heads, width = length // each.tokens, max(1, each.heads), each.width
            size = (count, heads, rows, width)
            begin = table.storage_offset() + column // dtype.itemsize
            there = table.as_strided(size, (page_bytes // dtype.itemsize, rows * width, width, 1), begin)
            kept = getattr(attention, each.name)
            *by_head, by_row, by_column = kept.stride()
            begin = kept.storage_offset() + first.first // each.tokens * by_row
            here = kept.as_strided(size, (rows * by_row, by_head[0] if by_head else 0, by_row, by_column), begin)
            yield there, here
            column += each.row_bytes() * rows


def _read(pool: ParkMemory, runs: Runs, at: int, size_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """So many bytes of a part, from `at` on."""
    found = []
    for offset, size in runs:
        if at < size and size_bytes:
            part = pool.view(offset + at, min(size - at, size_bytes))
            found.append(part)
            size_bytes -= part.shape[0]
        at = max(0, at - size)
    return np.concatenate(found)


def _elements(size: tuple[int, ...]) -> int:
    count = 1
    for length in size:
        count *= length
    return count
