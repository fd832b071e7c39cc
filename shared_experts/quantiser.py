"""The fast twin of `codecs.quantise_q4` and `quantise_q8`: a ctypes binding of `native/quantise.cpp`.

Equal to its truth bit for bit; the tests hold it to that. Not here: the definition of the codes. Invariant: what Python
hands over is contiguous, of the right type, and stays alive during the call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

from shared_experts.codecs import LARGEST_WEIGHT, CodesArray, F16Array, F32Array, I8Array, U8Array
from shared_experts.errors import NativeMissing
from shared_experts.layout import ExpertFormat

_ABI = 5
ISAS = ("scalar", "avx2", "avx512")  # numbered from 1
_BAD_WEIGHT = 2


class Quantiser:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.library, self.path = library, path
        library.quantise_abi.restype = ctypes.c_int32
        if library.quantise_abi() != _ABI:
            raise NativeMissing(f"{path}: is of another version; reinstall the package")
        library.quantise_best_isa.restype = ctypes.c_int32
        self.isas: tuple[str, ...] = ISAS[: library.quantise_best_isa()]
        integer, pointer = ctypes.c_int32, ctypes.c_void_p
        self._functions = {"q4": library.quantise_q4, "q8": library.quantise_q8}
        for function in self._functions.values():
            function.restype = ctypes.c_int32
            function.argtypes = [pointer, ctypes.c_int64, integer, integer, integer, pointer, pointer, pointer]

    def of(self, format: ExpertFormat) -> Callable[[F32Array, int], tuple[CodesArray, F16Array]]:
        """The function that writes a format with codes."""
        return self.quantise_q8 if format.bits == 8 else self.quantise

    def quantise(
        self, weights: F32Array, group: int, *, threads: int = 1, isa: str | None = None
    ) -> tuple[U8Array, F16Array]:
        """As `codecs.quantise_q4`, with the widest instruction set or `isa`; the interpreter is free meanwhile."""
        rows, columns = weights.shape
        if group not in (32, 64) or columns % group:
            raise ValueError(f"{columns} columns are not a multiple of a group of {group}")
        codes = np.empty((rows, columns // 2), np.uint8)
        return codes, self._run("q4", weights, group, threads, isa, codes)

    def quantise_q8(
        self, weights: F32Array, group: int = 64, *, threads: int = 1, isa: str | None = None
    ) -> tuple[I8Array, F16Array]:
        """As `codecs.quantise_q8`, likewise."""
        rows, columns = weights.shape
        if group != 64 or columns % group:
            raise ValueError(f"{columns} columns are not a multiple of a group of {group}; q8 has groups of 64")
        codes = np.empty((rows, columns), np.int8)
        return codes, self._run("q8", weights, group, threads, isa, codes)

    def _run(
        self, name: str, weights: F32Array, group: int, threads: int, isa: str | None, codes: CodesArray
    ) -> F16Array:
        rows, columns = weights.shape
        x = np.ascontiguousarray(weights, np.float32)
        scales = np.empty((rows, columns // group), np.float16)
        bad = ctypes.c_int64(-1)
        result = self._functions[name](
            x.ctypes.data,
            scales.size,
            group,
            len(self.isas) if isa is None else self.isas.index(isa) + 1,
            threads,
            codes.ctypes.data,
            scales.ctypes.data,
            ctypes.byref(bad),
        )
        if result == _BAD_WEIGHT:
            row, column = divmod(bad.value * group, columns)
            where = f"of row {row}, columns {column}..{column + group - 1}"
            raise ValueError(f"a weight is not finite or beyond {LARGEST_WEIGHT:.0f} ({where})")
        if result != 0:
            raise RuntimeError(f"quantise_{name} refused its arguments ({result})")
        return scales


@functools.cache
def load_quantiser() -> Quantiser:
    """The library beside this package; raises NativeMissing where it was not built."""
    folder = Path(__file__).parent / "native"
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"libquantise{suffix}"
        if path.exists():
            try:
                return Quantiser(ctypes.CDLL(str(path)), path)
            except (OSError, AttributeError) as error:
                raise NativeMissing(f"{path}: cannot be loaded ({error}); reinstall the package") from None
    raise NativeMissing(
        f"{folder}: libquantise was not built, so nothing can be converted; install g++ and reinstall the package"
    )
