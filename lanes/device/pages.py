"""Pages of a seated state, put together in the device's memory as the pool has them, and taken apart again.

Many whole pages at once: a copy for every kind of buffer, however many pages and layers. Not here: staging, copies
between device and host (carrier). Invariant: the bytes are those of `snapshot.pack`.

Letters: L layers, N pages, H heads (1: none), R rows of a page, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lanes.state.carrier import Part, Rows, Segments
from lanes.state.sequence import AttentionState
from shared_experts.park_memory import ParkMemory

MOST_KNOWN = 256  # batches of a conversation of 200,000 tokens, in either half

Runs = list[tuple[int, int]]
_Both = tuple[list[torch.Tensor], list[torch.Tensor]]


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


class Known:
    """Views of batches in a seat and in what they are staged in, whose memory stays where it is: every conversation has
    the same ones, and each view that is not made is a time less that the interpreter is asked for."""

    def __init__(self) -> None:
        self._views: dict[tuple[int, ...], _Both] = {}

    def views(self, memory: torch.Tensor, at: int, part: Rows, count: int) -> _Both:
        """As `_views` has them, in memory and in the state."""
        if not part.seated:
            return _both(memory, at, part, count)
        attention = next(iter(part.state.attention.values()))
        kept = getattr(attention, attention.shape.growing()[0].name)
        key = (memory.data_ptr() + at, kept.data_ptr(), id(part.state.shape), part.first, part.end, count)
        if (found := self._views.get(key)) is None:
            if len(self._views) >= MOST_KNOWN:
                self._views.clear()
            found = self._views[key] = _both(memory, at, part, count)
        return found


def gather(memory: torch.Tensor, parts: Sequence[Part], known: Known | None = None) -> None:
    """Parts, end to end, into memory uint8."""
    known = known or Known()
    for part, count, at in _steps(parts):
        if count:
            assert isinstance(part, Rows)
            torch._foreach_copy_(*known.views(memory, at, part, count))
            continue
        flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in part.tensors() if tensor.numel()]
        size_bytes = sum(each.shape[0] for each in flat)
        torch._foreach_copy_(list(memory[at : at + size_bytes].split([each.shape[0] for each in flat])), flat)


def scatter(
    memory: torch.Tensor, parts: Sequence[Part], pool: ParkMemory, runs: Sequence[Runs], known: Known | None = None
) -> None:
    """The way back. Tensors in host memory are filled from `runs` of the pool, which has the same bytes."""
    known, number = known or Known(), 0
    for part, count, at in _steps(parts):
        if count:
            assert isinstance(part, Rows)
            there, here = known.views(memory, at, part, count)
            torch._foreach_copy_(here, there)
        elif isinstance(part, Rows):
            stop = min(part.end, part.until)
            into = part.state.rows(part.first, stop)
            for (size, dtype), rows in zip(part.state.shape.row_shapes(part.first, part.end), into, strict=True):
                piece = memory[at : at + dtype.itemsize * _elements(size)].clone()  # aligned
                rows.copy_(piece.view(dtype).view(size)[..., : rows.shape[-2], :])
                at += piece.shape[0]
        else:
            begin, into, source = at, [], []
            for tensor in part.of:
                into.append(tensor.flatten().view(torch.uint8))
                if tensor.device == memory.device:
                    source.append(memory[at : at + tensor.nbytes])
                else:
                    source.append(torch.from_numpy(_read(pool, runs[number], at - begin, tensor.nbytes)))
                at += tensor.nbytes
            torch._foreach_copy_(into, source)
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
            if first.first % each.tokens or length % each.tokens or at % 8:
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


def _both(memory: torch.Tensor, at: int, first: Rows, count: int) -> _Both:
    there, here = zip(*_views(memory, at, first, count), strict=True)
    return list(there), list(here)


def _views(memory: torch.Tensor, at: int, first: Rows, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """[L, N, H, R, W] twice for every buffer of layers that lie alike: in memory, and in the state. By strides: this is
    done for every batch."""
    length, page_bytes, column = first.end - first.first, first.size_bytes, 0
    flat = memory[at : at + count * page_bytes]
    for layers in _alike(list(first.state.attention.values())):
        shape = layers[0].shape
        layer_bytes = sum(each.row_bytes() * (length // each.tokens) for each in shape.growing())
        begin = column
        for each in shape.growing():
            table = flat.view(each.dtype)
            unit, rows, heads, width = each.dtype.itemsize, length // each.tokens, max(1, each.heads), each.width
            size = (len(layers), count, heads, rows, width)
            strides = (layer_bytes // unit, page_bytes // unit, rows * width, width, 1)
            there = table.as_strided(size, strides, table.storage_offset() + begin // unit)
            kept = getattr(layers[0], each.name)
            *by_head, by_row, by_column = kept.stride()
            by_layer = getattr(layers[1], each.name).storage_offset() - kept.storage_offset() if layers[1:] else 0
            strides = (by_layer, rows * by_row, by_head[0] if by_head else 0, by_row, by_column)
            yield there, kept.as_strided(size, strides, kept.storage_offset() + first.first // each.tokens * by_row)
            begin += each.row_bytes() * rows
        column += layer_bytes * len(layers)


def _alike(layers: Sequence[AttentionState]) -> Iterator[list[AttentionState]]:
    """Layers after one another of one shape, whose buffers lie in one memory, equally far apart: those of a seat."""
    group: list[AttentionState] = []
    for layer in layers:
        if group and not _follows(group, layer):
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


def _follows(group: Sequence[AttentionState], layer: AttentionState) -> bool:
    last = group[-1]
    if layer.shape != last.shape:
        return False
    for each in layer.shape.growing():
        new, old = getattr(layer, each.name), getattr(last, each.name)
        if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr() or new.stride() != old.stride():
            return False
        before = old.storage_offset() - getattr(group[-2], each.name).storage_offset() if group[1:] else None
        if before not in (None, new.storage_offset() - old.storage_offset()):
            return False
    return True


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
