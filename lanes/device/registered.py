"""Host memory that the GPU's copy engines read and write by themselves: registered with the driver, range by range.

Not here: the shared region, which is registered for reading alone (pin), whose memory it is. Registering takes and
pins every page of a range. Invariants: a range that `add` took stays registered until `drop` or `close`; after these
it is not, whatever thread they are called by: else copies of what comes to lie there would be of the old pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from lanes.device.pin import DEVICE_MAP, LIBRARY, PAGE_BYTES, PORTABLE

Load = Callable[[str], Any]


class Registered:
    """Ranges of whole pages by address. Who adds one must have the device's context."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        self._load = load
        self._library: Any = None
        self._sizes: dict[int, int] = {}
        self._context = ctypes.c_void_p()  # the device's, as whoever added the last range had it

    @property
    def bytes(self) -> int:
        """Registered now."""
        return sum(self._sizes.values())

    def add(self, address: int, size_bytes: int, *, mapped: bool = False) -> bool:
        """False where the driver refuses, or there is none: copies then go through its own buffers. `mapped`: kernels
        are to read it too."""
        assert address % PAGE_BYTES == size_bytes % PAGE_BYTES == 0, "only whole pages can be registered"
        try:
            if self._library is None:
                self._library = self._load(LIBRARY)
        except OSError:
            return False
        code = self._library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes),
            ctypes.c_uint(PORTABLE | (DEVICE_MAP if mapped else 0)),
        )  # fmt: skip
        if code == 0:
            self._sizes[address] = size_bytes
            self._library.cuCtxGetCurrent(ctypes.byref(self._context))
        return bool(code == 0)

    def tries(self, address: int) -> bool:
        """Whether the driver takes a page there; it is as before afterwards."""
        taken = self.add(address, PAGE_BYTES)
        self.drop(address)
        return taken

    def drop(self, address: int) -> None:
        """A range is as any other memory again; no copy of it may be under way."""
        if self._sizes.pop(address, None) is None:
            return
        # By whatever thread the garbage collector runs on; without a context the driver may refuse.
        entered = self._library.cuCtxPushCurrent_v2(self._context) == 0
        self._library.cuMemHostUnregister(ctypes.c_void_p(address))
        if entered:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def close(self) -> None:
        """Drops all."""
        for address in list(self._sizes):
            self.drop(address)
