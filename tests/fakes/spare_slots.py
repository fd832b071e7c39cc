"""Slots of which the last ones can be given away: their bytes are lost, and come back at another place, or in part."""

from __future__ import annotations

import ctypes

import numpy as np

from lanes.experts.cache import ExpertCache
from lanes.experts.slots import HostSlots

LOST = 0xEE


class SpareSlots(HostSlots):
    """`back`: how many of the spare slots come back at the next `take`."""

    def __init__(self, slots: int, record_bytes: int, spare: int) -> None:
        super().__init__(slots, record_bytes)
        self.spare = self.back = spare
        self._fixed, self._size = slots - spare, record_bytes
        self._pieces = [self._piece() for _ in range(spare)]
        self.given = 0

    def _piece(self) -> np.ndarray:
        return np.full(self._size, LOST, np.uint8)

    def address(self, slot: int) -> int:
        return super().address(slot) if slot < self._fixed else self._pieces[slot - self._fixed].ctypes.data

    def give(self) -> None:
        self.given += 1
        for piece in self._pieces:
            ctypes.memset(piece.ctypes.data, LOST, self._size)  # whoever still reads there reads no record
        self._lost, self._pieces = self._pieces, []  # kept: an address that is still told must stay readable

    def take(self) -> int:
        count = min(self.back, self.spare) - len(self._pieces)
        self._pieces += [self._piece() for _ in range(count)]
        return count


def with_spare(cache: ExpertCache, spare: int) -> SpareSlots:
    """From now on the cache, which is empty, has its slots here."""
    assert not cache.resident.any()
    slots = SpareSlots(cache.room, cache.record_bytes, spare)
    cache._slots = slots
    cache._place[:] = [slots.address(slot) for slot in range(cache.room)]
    return slots
