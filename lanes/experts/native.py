"""The native expert kernel (lanes/native) behind numpy arrays: a ctypes binding, nothing more.

Not here: arithmetic (docs/expert-arithmetic.md, lanes/experts/reference.py) and where records lie; addresses come in.
Invariant: every array is checked here for dtype, shape and contiguity, and every index by the library, before a
byte is read. An address must be that of a whole record that stays mapped until the call returns.

Letters: J jobs (one expert each), P pairs (one (row, expert) each), R rows, K experts per row, H hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lanes.errors import NativeKernelFailed, NativeKernelUnavailable
from shared_experts.layout import RecordLayout

ISAS = {"scalar": 1, "avx2": 2, "avx512": 3}
_BAD_ARGUMENT, _NO_ISA = 1, 4  # of experts.h


class _Layout(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("gate_up_codes", ctypes.c_int64),
        ("down_codes", ctypes.c_int64),
        ("gate_up_scales", ctypes.c_int64),
        ("down_scales", ctypes.c_int64),
        ("record_bytes", ctypes.c_int64),
    )


def native_library() -> ctypes.CDLL:
    """The library, with the types of its calls; raises NativeKernelUnavailable."""
    folder = Path(__file__).parents[1] / "native"
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"libexperts{suffix}"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeKernelUnavailable(f"the native expert kernel cannot be loaded: {error}") from error
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        library.expert_pool_create.argtypes = [i32, pointer, i32, pointer]
        library.expert_pool_destroy.argtypes = [pointer]
        library.expert_pool_destroy.restype = None
        library.expert_pool_isa.argtypes = [pointer]
        library.expert_pool_erase.argtypes = [pointer]
        library.expert_pool_erase.restype = ctypes.c_int64
        library.expert_error_text.restype = ctypes.c_char_p
        library.expert_run.argtypes = [pointer, pointer, i32, pointer, pointer, pointer, i32, pointer, pointer]
        library.expert_combine.argtypes = [pointer, i32, i32, i32, pointer, i32, pointer, pointer, pointer]
        library.expert_product.argtypes = [pointer, i32, i32, i32, pointer, pointer, pointer]
        library.expert_read.argtypes = [pointer, pointer, i32, pointer, pointer]
        library.expert_work.argtypes = [i32, i32, pointer, i32, *[pointer] * 3]
        library.share_block_of.argtypes = [i32, i32, i32, pointer]
        library.share_create.argtypes = [pointer, pointer, pointer, pointer, i32, pointer]
        library.share_arm.argtypes = [pointer, ctypes.c_uint64]
        library.share_check.argtypes = [pointer]
        library.share_destroy.argtypes = [pointer]
        return library
    raise NativeKernelUnavailable(
        "the native expert kernel is not built (no lanes/native/libexperts*.so): "
        "install a C++17 compiler (Debian: apt-get install g++) and install this package again"
    )


def check_array(name: str, array: NDArray[Any], dtype: type, *shape: int) -> int:
    """The array's address, or ValueError."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name}: want contiguous {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")
    return array.ctypes.data


@dataclass(frozen=True, slots=True)
class NativePool:
    """What other calls of the library need of an open kernel."""

    library: ctypes.CDLL
    pool: ctypes.c_void_p
    layout: _Layout

    def check(self, code: int) -> None:
        """Raises what a code of experts.h means."""
        if not code:
            return
        text = self.library.expert_error_text(code).decode()
        if code == _BAD_ARGUMENT:
            raise ValueError(f"native expert kernel: {text}")
        raise NativeKernelFailed(f"native expert kernel: {text}")


class ExpertKernel:
    """One thread pool and one record layout. Calls from several threads wait for each other.

    `cores` pins the worker threads: cores[0] is the calling thread's (pinned by whoever owns it), so n cores start
    n - 1 threads; `threads` without `cores` pins nothing. `isa` is scalar, avx2 or avx512; None takes the
    best this CPU has. Not usable in a child after fork().
    """

    def __init__(
        self,
        layout: RecordLayout,
        cores: Sequence[int] | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        self.layout = layout
        self._pool: ctypes.c_void_p | None = None
        if isa is not None and isa not in ISAS:
            raise ValueError(f"{isa!r} is none of {', '.join(ISAS)}")
        if cores is not None and threads is not None and threads != len(cores):
            raise ValueError(f"{threads} threads for {len(cores)} cores")
        self.threads = len(cores) if cores is not None else 1 if threads is None else threads
        self._library = native_library()
        self._layout = _Layout(
            layout.format.id, layout.hidden, layout.intermediate, 0, layout.gate_up_codes, layout.down_codes,
            layout.gate_up_scales, layout.down_scales, layout.record_bytes,
        )  # fmt: skip
        pinned = None if cores is None else (ctypes.c_int32 * len(cores))(*cores)
        pool = ctypes.c_void_p()
        code = self._library.expert_pool_create(
            0 if isa is None else ISAS[isa], pinned, self.threads, ctypes.byref(pool)
        )
        if code == _NO_ISA:
            best = self.best_isa()
            raise NativeKernelUnavailable(f"this CPU cannot run {isa}; its best is {best}")
        self._raise(code)
        self._pool = pool
        self.isa = next(name for name, id in ISAS.items() if id == self._library.expert_pool_isa(pool))

    @staticmethod
    def best_isa() -> str:
        """The widest instruction set this CPU has."""
        best = native_library().expert_best_isa()
        return next(name for name, id in ISAS.items() if id == best)

    def run(
        self,
        addresses: NDArray[np.uint64],  # [J], of records
        row_offsets: NDArray[np.int32],  # [J + 1], ascending, from 0 to P
        row_index: NDArray[np.int32],  # [P], rows of x
        x: NDArray[np.float32],  # [R, H]
        out: NDArray[np.float32],  # [P, H]
    ) -> None:
        """out[p] = expert j applied to x[row_index[p]], unweighted, for p in row_offsets[j]..row_offsets[j + 1]."""
        jobs, pairs, rows, hidden = len(addresses), len(row_index), len(x), self.layout.hidden
        offsets = check_array("row_offsets", row_offsets, np.int32, jobs + 1)
        if row_offsets[-1] != pairs:
            raise ValueError(f"row_offsets end at {row_offsets[-1]}, there are {pairs} pairs")
        code = self._library.expert_run(
            self._open(), ctypes.byref(self._layout), jobs, check_array("addresses", addresses, np.uint64, jobs),
            offsets, check_array("row_index", row_index, np.int32, pairs), rows,
            check_array("x", x, np.float32, rows, hidden), check_array("out", out, np.float32, pairs, hidden),
        )  # fmt: skip
        self._raise(code)

    def combine(
        self,
        pair_index: NDArray[np.int32],  # [R, K], rows of y
        weights: NDArray[np.float32],  # [R, K]
        y: NDArray[np.float32],  # [P, H]
        out: NDArray[np.float32],  # [R, H]
    ) -> None:
        """out[r] = fma over k in ascending order of weights[r, k] * y[pair_index[r, k]], from +0."""
        rows, chosen = pair_index.shape
        pairs, hidden = y.shape
        code = self._library.expert_combine(
            self._open(), rows, chosen, hidden, check_array("pair_index", pair_index, np.int32, rows, chosen), pairs,
            check_array("weights", weights, np.float32, rows, chosen), check_array("y", y, np.float32, pairs, hidden),
            check_array("out", out, np.float32, rows, hidden),
        )  # fmt: skip
        self._raise(code)

    def read(self, addresses: NDArray[np.uint64]) -> int:
        """Reads every byte of the records with this pool's threads and returns their XOR: measures memory."""
        total = ctypes.c_uint64()
        code = self._library.expert_read(
            self._open(), ctypes.byref(self._layout), len(addresses),
            check_array("addresses", addresses, np.uint64, len(addresses)), ctypes.byref(total),
        )  # fmt: skip
        self._raise(code)
        return total.value

    def erase(self) -> int:
        """Zeroes what buffers hold of earlier rows; returns how many bytes were not zero."""
        return int(self._library.expert_pool_erase(self._open()))

    def close(self) -> None:
        """Ends the threads; later calls fail. Safe to call twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._library.expert_pool_destroy(pool)

    def abandon(self) -> None:
        """As `close`, but threads and buffers stay for ever: somebody who cannot be waited for may still use them."""
        self._pool = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> ctypes.c_void_p:
        if self._pool is None:
            raise ValueError("this kernel is closed")
        return self._pool

    def native(self) -> NativePool:
        """The library, the pool and the layout; the pool lives until `close`."""
        return NativePool(self._library, self._open(), self._layout)

    def _raise(self, code: int) -> None:
        NativePool(self._library, ctypes.c_void_p(), self._layout).check(code)
