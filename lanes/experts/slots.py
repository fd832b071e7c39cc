"""Where the records of a cache lie: equal slots in one piece of memory that exists from the start.

Not here: which record has which slot (cache). The slots of a GPU lane are in lanes.experts.gpu.slots.
Invariant: a slot that is copied into again holds the later record once both copies are done.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lanes import limits

Done = Callable[[], bool]  # whether a copy has arrived; never waits


class Slots(Protocol):
    """Room for records."""

    swap_bytes: int  # that may be copied between two windows

    def address(self, slot: int) -> int:
        """Where a slot begins, for whoever reads it."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> Done:
        """Begins to copy records: (slot, address of the record in the region) each."""

    def join(self) -> None:
        """What the device is given from here on runs after all copies that have begun."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Zeroed host memory for a table that readers of the slots copy from."""


class HostSlots:
    """Private memory of this process; a copy is done when the call returns."""

    swap_bytes = limits.SWAP_BYTES_PER_WINDOW

    def __init__(self, slots: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._buffer = np.frombuffer(mmap.mmap(-1, max(1, slots) * record_bytes, mmap.MAP_PRIVATE), np.uint8)

    def address(self, slot: int) -> int:
        """In this process."""
        return self._buffer.ctypes.data + slot * self._record_bytes

    def copy(self, copies: Sequence[tuple[int, int]]) -> Done:
        """Copies."""
        for slot, home in copies:
            ctypes.memmove(self.address(slot), home, self._record_bytes)
        return lambda: True

    def join(self) -> None:
        """They are done."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Plain memory."""
        return np.zeros(shape, dtype)
