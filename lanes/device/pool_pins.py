"""The park pool's memory as the GPU's copy engines reach it: registered piece by piece, as its bytes are first used.

Registering takes every page of a piece. A little more than the owner has used is registered ahead of need, where the
host has room for it; the rest stays untaken. When the owner gives memory of free segments back to the host
(`punches`), those segments are other pages afterwards: everything is registered anew.
Not here: copies, who takes a piece's memory before (carrier). Invariant: a piece that is registered is what this
process and every other sees there.
"""

from __future__ import annotations

import structlog

from lanes.device.pin import PAGE_BYTES
from lanes.device.registered import Registered
from shared_experts import host_memory
from shared_experts.layout import align
from shared_experts.park_memory import ParkMemory

PIECE_BYTES = 32 << 20
AHEAD_BYTES = 1 << 30

_log = structlog.get_logger(__name__)


class PoolPins:
    """Of one pool at a time. Where the driver refuses, copies go through its own buffers; None: there is no driver."""

    def __init__(
        self, registered: Registered | None, piece_bytes: int = PIECE_BYTES, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self._registered, self.piece_bytes, self._ahead_bytes = registered, piece_bytes, ahead_bytes
        self._pieces: set[int] = set()  # looked at: registered, or refused
        self.refused = False
        self._punches = 0

    def stale(self, memory: ParkMemory) -> bool:
        """Whether everything must be dropped before the next copy."""
        return bool(self._pieces) and memory.punches != self._punches

    def drop(self) -> None:
        """Nothing is registered any more; no copy may be under way."""
        if self._registered is not None:
            self._registered.close()
        self._pieces.clear()

    @property
    def registered_bytes(self) -> int:
        """Of the pool, now."""
        return self._registered.bytes if self._registered is not None else 0

    def next(self, memory: ParkMemory) -> tuple[int, int] | None:
        """(offset, bytes) of the first piece that is used, or soon may be, and is not registered."""
        if self._registered is None:
            return None
        for piece in range(-(-memory.total_bytes // self.piece_bytes)):
            if piece in self._pieces:
                continue
            at = piece * self.piece_bytes
            if at >= memory.touched_bytes and not self._ahead(at - memory.touched_bytes):
                break
            return at, align(min(self.piece_bytes, memory.total_bytes - at), PAGE_BYTES)
        return None

    def _ahead(self, size_bytes: int) -> bool:
        """Whether to take that much before the owner uses it: the host has room for all that is taken so, twice."""
        spare_bytes = host_memory.available_bytes() - host_memory.floor_bytes()
        return size_bytes < self._ahead_bytes and spare_bytes > 2 * self._ahead_bytes

    def cover(self, memory: ParkMemory, offset: int, size_bytes: int) -> bool:
        """Registers what of these bytes is not; whether there was anything to do."""
        first, last = offset // self.piece_bytes, (offset + size_bytes - 1) // self.piece_bytes
        missing = [piece for piece in range(first, last + 1) if piece not in self._pieces]
        self._punches = memory.punches
        for piece in missing:
            at = piece * self.piece_bytes
            size = min(self.piece_bytes, memory.total_bytes - at)
            size = align(size, PAGE_BYTES)  # the map ends with a page
            self._pieces.add(piece)
            if self._registered is None or self._registered.add(memory.address + at, size) or self.refused:
                continue
            self.refused = True
            _log.warning("pool_unpinned")
        return bool(missing)
