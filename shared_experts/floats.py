"""The fast twins of the float conversions of `codecs`: a ctypes binding of `native/floats.cpp`.

Equal to their truth bit for bit; the tests hold them to that. Each call leaves the interpreter free, so threads run
beside each other. Not here: the definitions. Invariant: buffers are contiguous, of one length, and alive in the call.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from shared_experts.codecs import F32Array, U8Array, U16Array
from shared_experts.quantiser import load_quantiser

_LONG, _POINTER = ctypes.c_int64, ctypes.c_void_p


class NotFinite(ValueError):
    """A value cannot be converted: `index` says which of those given, `reason` why."""

    def __init__(self, index: int, reason: str) -> None:
        self.index, self.reason = index, reason
        super().__init__(f"element {index} {reason}")


class Floats:
    """The loaded functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._from_e4m3, self._from_bf16 = library.floats_from_e4m3, library.floats_from_bf16
        self._to_bf16 = library.bf16_from_floats
        self._from_e4m3.argtypes = [_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER]
        self._from_bf16.argtypes = [_POINTER, _LONG, _POINTER]
        self._to_bf16.argtypes = [_POINTER, _LONG, _POINTER]
        for function in (self._from_e4m3, self._from_bf16, self._to_bf16):
            function.restype = _LONG

    def from_e4m3(
        self, codes: U8Array, start: int, columns: int, scales: F32Array, block: tuple[int, int], out: F32Array
    ) -> None:
        """Codes [N] from element `start` of a matrix into `out` [N]; raises NotFinite for a code that is no number."""
        _same(codes, out)
        assert scales.dtype == np.float32
        assert scales.flags.c_contiguous
        assert -(-(start + len(codes)) // columns) <= scales.shape[0] * block[0]
        assert columns <= scales.shape[1] * block[1] < columns + block[1]
        bad = self._from_e4m3(
            codes.ctypes.data, start, len(codes), columns, *block, scales.ctypes.data, out.ctypes.data
        )  # fmt: skip
        if bad >= 0:
            raise NotFinite(bad, "is not a number")

    def from_bf16(self, bits: U16Array, out: F32Array) -> None:
        """Bits [N] into `out` [N]; raises NotFinite."""
        _same(bits, out)
        self._raise(self._from_bf16(bits.ctypes.data, len(bits), out.ctypes.data))

    def check_bf16(self, bits: U16Array) -> None:
        """Raises NotFinite where one of the bits [N] is none."""
        _same(bits, bits)
        self._raise(self._from_bf16(bits.ctypes.data, len(bits), None))

    def to_bf16(self, values: F32Array) -> U16Array:
        """Values [N] to nearest even; raises NotFinite where one rounds to infinity."""
        bits = np.empty(len(values), np.uint16)
        _same(values, bits)
        self._raise(self._to_bf16(values.ctypes.data, len(values), bits.ctypes.data), "is too large for bf16")
        return bits

    @staticmethod
    def _raise(bad: int, reason: str = "is not finite") -> None:
        if bad >= 0:
            raise NotFinite(bad, reason)


def _same(*arrays: F32Array | U8Array | U16Array) -> None:
    for array in arrays:
        assert array.ndim == 1
        assert array.flags.c_contiguous
        assert len(array) == len(arrays[0])


@functools.cache
def load_floats() -> Floats:
    """The functions of the library beside this package; raises NativeMissing where it was not built."""
    return Floats(load_quantiser().library)
