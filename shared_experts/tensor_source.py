"""One tensor of a checkpoint as numbers: whatever its dtype and scales, its values come out as finite fp32 or bf16.

An FP8 tensor (E4M3) has scales beside it, one per block of its last two dimensions, or one for all of a table; a value
is the fp32 product of the two, nothing more. Not here: which tensors there are (`checkpoint`).

Invariant: a read is positioned, touches only its own bytes, and either gives every value or names the tensor.

Letters: R rows and C columns of a matrix.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared_experts import limits
from shared_experts.codecs import LARGEST_E4M3, F32Array, U8Array, U16Array
from shared_experts.errors import CheckpointError
from shared_experts.floats import NotFinite, load_floats
from shared_experts.qwen4_exp import NgramConstants
from shared_experts.safetensors_reader import DTYPE_BYTES, PAGE_BYTES, SafetensorsFile, TensorInfo

FLOATS, FP8 = ("F32", "F16", "BF16"), "F8_E4M3"
LARGEST_SCALE = 3.4028234663852886e38 / LARGEST_E4M3  # so that no product is infinite


class Scratch(threading.local):
    """Memory of one thread that is used again: fresh pages of tens of MiB per expert cost a third of converting it."""

    def __init__(self) -> None:
        self._memory: dict[str, U8Array] = {}

    def bytes(self, use: str, count: int) -> U8Array:
        """`count` bytes for a purpose, on a page, with anything in them; the next call gives them away."""
        if len(self._memory.get(use, ())) < count:
            memory = mmap.mmap(-1, -(-count // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory[use] = np.frombuffer(memory, np.uint8)
        return self._memory[use][:count]

    def floats(self, use: str, count: int) -> F32Array:
        """Likewise, `count` fp32."""
        return self.bytes(use, 4 * count).view(np.float32)


_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class Source:
    """One floating-point tensor of one file; an FP8 one has `scale` and `block`."""

    file: SafetensorsFile
    info: TensorInfo
    scale: Source | None = None
    block: tuple[int, int] = (1, 1)  # rows and columns that share a scale

    @property
    def elements(self) -> int:
        """How many values it holds."""
        return math.prod(self.info.shape)

    def error(self, reason: str) -> CheckpointError:
        """A refusal that names this tensor."""
        return CheckpointError(self.file.path, reason, tensor=self.info.name)

    def read(self, start: int, count: int) -> F32Array:
        """`count` values from element `start` as finite fp32."""
        out = np.empty(count, np.float32)
        self._widen(self._raw(start, count), start, out, {})
        return out

    def pieces(self, start: int, count: int, step: int) -> Iterator[tuple[int, F32Array]]:
        """The same values as (how many came before, at most `step` of them), each valid until the next.

        The bytes are read in one go; the values are made a piece at a time, so that they stay in the processor's cache.
        """
        raw, size, scales = self._raw(start, count), DTYPE_BYTES[self.info.dtype], dict[int, F32Array]()
        for at in range(0, count, step):
            end = min(count, at + step)
            out = _scratch.floats("pieces", end - at)
            self._widen(raw[at * size : end * size], start + at, out, scales)
            yield at, out

    def read_bf16(self, start: int, count: int) -> U16Array:
        """The same values rounded to bf16; those that already are bf16 are passed on as they stand."""
        try:
            if self.info.dtype != "BF16":
                return load_floats().to_bf16(self.read(start, count))
            bits: U16Array = self._raw(start, count).view("<u2").copy()
            load_floats().check_bf16(bits)
            return bits
        except NotFinite as bad:
            raise self.error(f"element {start + bad.index} {bad.reason}") from None

    def integers(self) -> tuple[int, ...]:
        """All values of an int64 tensor."""
        return tuple(self._raw(0, self.elements).view("<i8").tolist())

    def steps(self) -> Iterator[tuple[int, int]]:
        """(start, count) of runs of some MiB that cover it in order."""
        step = limits.BLOCK_BYTES // 8
        for start in range(0, self.elements, step):
            yield start, min(step, self.elements - start)

    def _raw(self, start: int, count: int) -> U8Array:
        """Bytes that are valid until this thread reads another tensor of the same dtype."""
        size = DTYPE_BYTES[self.info.dtype]
        # one purpose per dtype: an FP8 tensor reads its scales, which are of another, while it holds its codes
        buffer = _scratch.bytes(self.info.dtype, count * size + 2 * PAGE_BYTES)
        raw = np.frombuffer(self.file.read(self.info, start * size, count * size, buffer.data), np.uint8)
        return raw.copy() if raw.ctypes.data % size else raw

    def _widen(self, raw: U8Array, start: int, out: F32Array, scales: dict[int, F32Array]) -> None:
        """Bytes of the elements from `start` to fp32; `scales` are those of the matrices that were met before."""
        dtype = self.info.dtype
        try:
            if dtype == FP8:
                self._widen_fp8(raw, start, out, scales)
            elif dtype == "BF16":
                load_floats().from_bf16(raw.view("<u2"), out)
            else:
                out[:] = raw.view("<f4" if dtype == "F32" else "<f2")
                self._check(out)
        except NotFinite as bad:
            raise self.error(f"element {start + bad.index} {bad.reason}") from None

    def _check(self, values: F32Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            suspect = not np.isfinite(values.sum())
        if suspect and not (finite := np.isfinite(values)).all():
            raise NotFinite(int(np.argmin(finite)), "is not finite")

    def _widen_fp8(self, raw: U8Array, start: int, out: F32Array, scales: dict[int, F32Array]) -> None:
        """Matrix after matrix, each with its own grid of scales."""
        rows, columns = self.info.shape[-2:]
        done = 0
        while done < len(raw):
            matrix, at = divmod(start + done, rows * columns)
            count = min(len(raw) - done, rows * columns - at)
            if matrix not in scales:
                scales[matrix] = self._scales(matrix)
            part = slice(done, done + count)
            try:
                load_floats().from_e4m3(raw[part], at, columns, scales[matrix], self.block, out[part])
            except NotFinite as bad:
                raise NotFinite(done + bad.index, bad.reason) from None
            done += count

    def _scales(self, matrix: int) -> F32Array:
        assert self.scale is not None
        rows, columns = self.info.shape[-2:]
        shape = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        size = shape[0] * shape[1]
        values = self.scale.read(matrix * size, size)
        if not ((values > 0) & (values <= LARGEST_SCALE)).all():
            raise self.scale.error("a scale is not positive or so large that values become infinite")
        return values.reshape(shape)


@dataclass(frozen=True, slots=True)
class NgramSource:
    """One n-gram table: its parts in row order, and its hash constants."""

    parts: tuple[Source, ...]
    rows: int
    columns: int
    constants: NgramConstants

    def runs(self, first: int, end: int) -> Iterator[tuple[Source, int, int]]:
        """(part, first row in it, rows) for the table's rows first..end-1."""
        at = 0
        for part in self.parts:
            rows = part.info.shape[0]
            low, high = max(first, at), min(end, at + rows)
            if low < high:
                yield part, low - at, high - low
            at += rows
