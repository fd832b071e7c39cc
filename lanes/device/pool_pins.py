"""The park pool's memory as the GPU's copy engines reach it: registered piece by piece, as its bytes are first used.

Registering takes every page of a piece, so what the owner has never used stays untaken. When the owner gives memory of
free segments back to the host (`punches`), those segments are other pages afterwards: everything is registered anew.
Not here: copies. Invariant: a piece that is registered is what this process and every other sees there.
"""

from __future__ import annotations

import structlog

from lanes.device.pin import PAGE_BYTES
from lanes.device.registered import Registered
from shared_experts.layout import align
from shared_experts.park_memory import ParkMemory

PIECE_BYTES = 64 << 20

_log = structlog.get_logger(__name__)


class PoolPins:
    """Of one pool at a time. Where the driver refuses, copies go through its own buffers; None: there is no driver."""

    def __init__(self, registered: Registered | None, piece_bytes: int = PIECE_BYTES) -> None:
        self._registered, self.piece_bytes = registered, piece_bytes
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
