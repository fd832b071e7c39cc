"""Maps the shared region into this process for reading, and lends the descriptor on.

Not here: what a record holds (layout.py), pinning for a GPU (the lane).
Invariant: an `AttachedRegion` is an immutable, finished region of the expected pack, checked before it was mapped;
attaching touches the header page only, whatever the size.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from shared_experts.descriptor_server import DescriptorServer
from shared_experts.errors import RegionMismatch, RegionUnavailable
from shared_experts.handoff import RegionStatus, ask
from shared_experts.layout import REGION_HEADER_BYTES, record_offset
from shared_experts.manifest import Manifest
from shared_experts.region import RegionHeader, RegionShape, check_descriptor

_POLL_S = 0.05
_ASK_LIMIT_S = 2.0


class AttachedRegion:
    """A read-only `MAP_SHARED` view of the region; a stray write through it faults.

    Holds the descriptor for as long as it lives, so that a dead owner's successor can adopt the region from here.
    """

    def __init__(self, fd: int, header: RegionHeader) -> None:
        """Takes over `fd`, which `check_descriptor` has passed with this header."""
        self.fd = fd
        self.header = header
        self.mapped_bytes = os.fstat(fd).st_size  # whole pages: a 2 MiB one may reach past the last record
        self._map = mmap.mmap(fd, self.mapped_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._map.madvise(mmap.MADV_DONTDUMP)  # a lane's core dump does not hold the experts
        self.view = memoryview(self._map)  # [mapped_bytes], read-only, starts at the header page
        self.base_address = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)

    @property
    def generation(self) -> bytes:
        """16 random bytes of the build that made this region; an adopted region keeps them."""
        return self.header.generation

    @property
    def records_address(self) -> int:
        """Address of record (0, 0)."""
        return self.base_address + REGION_HEADER_BYTES

    def record_address(self, layer: int, expert: int) -> int:
        """Address of one expert's record in this process; raises IndexError outside the region's shape."""
        if not (0 <= layer < self.header.layers and 0 <= expert < self.header.experts):
            raise IndexError(f"layer {layer}, expert {expert} of {self.header.layers} × {self.header.experts}")
        return self.records_address + record_offset(layer, expert, self.header.experts, self.header.record_bytes)

    def record(self, layer: int, expert: int) -> memoryview:
        """The bytes of one record, read-only."""
        start = self.record_address(layer, expert) - self.base_address
        return self.view[start : start + self.header.record_bytes]

    def status(self) -> RegionStatus:
        """What a process that lends this region says about it."""
        total = self.header.total_bytes
        return RegionStatus(
            "ready", "adopted", total, total, self.header.fingerprint, self.header.generation, os.getpid()
        )

    def lend(self, socket_path: str | os.PathLike[str]) -> DescriptorServer:
        """A server of this descriptor, not yet started; close it before the region."""
        return DescriptorServer(socket_path, lambda: (self.status(), self.fd))

    def close(self) -> None:
        """Unmaps and closes. Whoever still holds an address of a record must be done; views handed out raise here."""
        if self.fd < 0:
            return
        self.view.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> AttachedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(
    socket_path: str | os.PathLike[str],
    expected: Manifest,
    timeout_s: float,
    *,
    on_wait: Callable[[str], None] | None = None,
) -> AttachedRegion:
    """Asks the owner (or a lane) for its descriptor, waiting while there is no region yet, checks it and maps it.

    `on_wait` hears the reason whenever it changes. Raises RegionUnavailable when the time is up, RegionMismatch or
    HandoffError at once.
    """
    shape = RegionShape.of(expected)
    deadline_s = time.monotonic() + timeout_s
    reason = ""
    while True:
        remaining_s = deadline_s - time.monotonic()
        try:
            status, fd = ask(socket_path, "descriptor", timeout_s=max(0.01, min(_ASK_LIMIT_S, remaining_s)))
        except RegionUnavailable as error:
            found = str(error)
        else:
            if fd is not None:
                return attach_descriptor(fd, shape, generation=status.generation)
            if status.fingerprint != shape.fingerprint:
                raise RegionMismatch(
                    f"the owner prepares pack {status.fingerprint.hex()[:16]}, wanted {shape.fingerprint.hex()[:16]}",
                    check="fingerprint",
                )
            found = f"the region is not ready: {status}"
        if found != reason and on_wait is not None:
            on_wait(found)
        reason = found
        if time.monotonic() + _POLL_S >= deadline_s:
            raise RegionUnavailable(f"no region after {timeout_s:g} s: {reason}")
        time.sleep(_POLL_S)


def attach_descriptor(fd: int, shape: RegionShape, *, generation: bytes | None = None) -> AttachedRegion:
    """Checks and maps a descriptor that somebody sent; it is closed on failure."""
    try:
        return AttachedRegion(fd, check_descriptor(fd, shape, generation=generation))
    except BaseException:
        os.close(fd)
        raise
