"""Calls of the CUDA driver that torch has no name for: copies between addresses, words that a stream writes and awaits.

Not here: what is copied and which words (slots, share). Invariant: every call that fails raises GpuFailed.
"""

from __future__ import annotations

import ctypes
from functools import cache

from lanes.errors import GpuFailed

_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, (int64) (word - value) >= 0
_u64, _pointer, _flags = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuFailed(f"the CUDA driver cannot be loaded: {error}") from error
    library.cuMemcpyAsync.argtypes = [_u64, _u64, ctypes.c_size_t, _pointer]
    for name in ("cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2"):
        getattr(library, name).argtypes = [_pointer, _u64, _u64, _flags]
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _check(call: str, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(name))
        raise GpuFailed(f"{call}: {name.value.decode() if name.value else code}")


@cache
def _at_once() -> ctypes.PyDLL:
    """For calls that come back in microseconds: the interpreter is kept, which threads beside would take for longer."""
    _library()
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = [_u64, _u64, ctypes.c_size_t, _pointer]
    return library


def copy(to: int, source: int, size_bytes: int, stream: int, *, pinned: bool = False) -> None:
    """Enqueues a copy between two addresses, either side's. Where the host's is not `pinned` it may wait for others."""
    library = _at_once() if pinned else _library()
    _check("copy", library.cuMemcpyAsync(to, source, size_bytes, stream))


def write_word(stream: int, address: int, value: int) -> None:
    """Enqueues: everything before is visible to the host, then the 64-bit word at `address` becomes `value`."""
    _check("write a word", _library().cuStreamWriteValue64_v2(stream, address, value, 0))


def await_word(stream: int, address: int, value: int) -> None:
    """Enqueues: nothing after this runs until the 64-bit word at `address`, as a signed number, is at least `value`."""
    _check("await a word", _library().cuStreamWaitValue64_v2(stream, address, value, _WAIT_GEQ))
