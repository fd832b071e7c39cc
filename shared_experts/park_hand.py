"""Digests of bytes that lie in several places, copied elsewhere on the way, by the calling thread.

    [ place | place | place ] ──▶ xxh3-128
       └──────▶ copies, where they are asked for: the digest is of what was read

`Native` is the fast twin (`native/digest.cpp`): one call, the interpreter free meanwhile. `plain` is the truth, and
what there is where no library was built: each of its many small steps waits for the interpreter. Not here: whose bytes
(lanes). Invariant: what a place names is alive, and of that size, until the call returns.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from shared_experts.errors import NativeMissing
from shared_experts.quantiser import load_quantiser

AT_ONCE_BYTES = 1 << 20  # hashed, then copied while a core's cache has it
NATIVE_LEAST_BYTES = 241  # a shorter one is another algorithm
_ABI = 1
_STOPPED = 2

Place = tuple[int, int, int]  # (address, bytes, address of the copy or 0)


class Stop:
    """Says to threads in `plain` and `native` that nobody wants their digest any more."""

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        """Of the word, which is not 0 once it is set."""
        return ctypes.addressof(self._word)

    def set(self) -> None:
        """From any thread."""
        self._word.value = 1

    def is_set(self) -> bool:
        """Whether it is."""
        return bool(self._word.value)


def plain(places: Sequence[Place], stop: Stop | None = None) -> bytes | None:
    """The digest; None where `stop` came before the end."""
    digest = xxhash.xxh3_128()
    for source, size_bytes, to in places:
        for at in range(0, size_bytes, AT_ONCE_BYTES):
            if stop is not None and stop.is_set():
                return None
            step = min(AT_ONCE_BYTES, size_bytes - at)
            digest.update((ctypes.c_uint8 * step).from_address(source + at))
            if to:
                ctypes.memmove(to + at, source + at, step)
    return digest.digest()


class Native:
    """The loaded functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if library.digest_abi() != _ABI:
            raise NativeMissing("digest_abi: is of another version; reinstall the package")
        self.isas = range(1, library.digest_best_isa() + 1)
        pointer = ctypes.c_void_p
        self._places = library.digest_places
        self._places.argtypes = [pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int32, pointer, pointer]
        self._places.restype = ctypes.c_int32

    def __call__(self, places: Sequence[Place], stop: Stop | None = None, *, isa: int | None = None) -> bytes | None:
        """As `plain`."""
        if sum(size_bytes for _, size_bytes, _ in places) < NATIVE_LEAST_BYTES:
            return plain(places, stop)
        table = np.array(places, np.uint64).T.copy()
        digest = ctypes.create_string_buffer(16)
        first, row = table.ctypes.data, table.strides[0]
        result = self._places(
            first, first + row, first + 2 * row, len(places), self.isas[-1] if isa is None else isa,
            stop.address if stop is not None else None, digest,
        )  # fmt: skip
        if result == _STOPPED:
            return None
        assert not result, "places that are none"
        return digest.raw


@functools.cache
def load() -> Callable[[Sequence[Place], Stop | None], bytes | None]:
    """The fast one where it was built."""
    try:
        return Native(load_quantiser().library)
    except (NativeMissing, AttributeError):
        return plain
