"""The shared region as a GPU reads it: registered read-only, so that kernels follow plain addresses into host memory.

    mapped   the driver registered the region (portable, mapped, read-only): a host address has a device address
    copied   it cannot (no HostRegisterReadOnly): the GPU reads no expert in place. Misses are the CPU's, and what the
             cache admits is copied through the driver's own pinned buffers

Not here: which experts (lanes.experts). The driver library is asked through ctypes, because torch offers no device
address of registered memory. Invariant: while a `PinnedRegion` is open its range stays registered; it never writes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lanes.errors import CudaUnavailable

LIBRARY = "libcuda.so.1"
PORTABLE, DEVICE_MAP, READ_ONLY = 1, 2, 8  # CU_MEMHOSTREGISTER_*
READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
PAGE_BYTES = 4096
Load = Callable[[str], Any]


class PinnedRegion:
    """`address` .. `address + size_bytes`, whole pages, mapped for reading as long as this lives."""

    def __init__(self, address: int, size_bytes: int, *, ordinal: int = 0, load: Load = ctypes.CDLL) -> None:
        """Registers; raises CudaUnavailable without a driver, or where a device that can refuses.

        The calling thread must have the device's context (`lanes.device.cuda.start`).
        """
        assert address % PAGE_BYTES == size_bytes % PAGE_BYTES == 0, "only whole pages can be registered"
        self.address, self.size_bytes = address, size_bytes
        self.seconds = 0.0
        self._offset: int | None = None  # from a host address to the device's
        try:
            self._cuda = load(LIBRARY)
        except OSError as error:
            raise CudaUnavailable(f"--device cuda: no CUDA driver ({LIBRARY} cannot be loaded)") from error
        supported = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(supported), READ_ONLY_SUPPORTED, ordinal)
        if not supported.value:
            return
        began_s = time.monotonic()
        self._check(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes),
            ctypes.c_uint(PORTABLE | DEVICE_MAP | READ_ONLY),
        )  # fmt: skip
        self._offset = 0  # registered: `close` must undo it from here on
        found = ctypes.c_uint64()
        try:
            self._check("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        except CudaUnavailable:
            self.close()
            raise
        self._offset = found.value - address
        self.seconds = time.monotonic() - began_s

    @property
    def mode(self) -> str:
        """`mapped` or `copied`."""
        return "copied" if self._offset is None else "mapped"

    def device_address(self, host_address: int) -> int | None:
        """Where the device reads what lies at a host address of the region; None in mode `copied`."""
        assert self.address <= host_address < self.address + self.size_bytes, "not in the region"
        return None if self._offset is None else host_address + self._offset

    def close(self) -> None:
        """Gives the registration back; no kernel may still read. Safe to call twice."""
        registered, self._offset = self._offset is not None, None
        if registered:
            self._cuda.cuMemHostUnregister(ctypes.c_void_p(self.address))

    def __enter__(self) -> PinnedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise CudaUnavailable(f"--device cuda: {name} failed with code {code}")
