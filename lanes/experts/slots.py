"""Where the records of a cache lie: equal slots in one piece of memory that exists from the start.

Not here: which record has which slot (cache). The slots of a GPU lane are in lanes.experts.gpu.slots.
Invariant: a slot that is copied into again holds the later record once both copies are done.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lanes import limits

Mark = object  # a point in what the device has been given; what it is, is the slots' affair


@dataclass(frozen=True, slots=True)
class Took:
    """Nanoseconds of copies, and how long the device waited for them with nothing else to do."""

    copying_ns: int = 0
    waiting_ns: int = 0


class Arrival(Protocol):
    """Of copies that were begun together."""

    def here(self) -> bool:
        """Whether they are done; never waits."""

    def join(self) -> None:
        """What the device is given from here on runs after them."""

    def took(self) -> Took:
        """Once the device has finished what it was given."""


class Slots(Protocol):
    """Room for records."""

    swap_bytes: int  # that may be copied between two windows
    spare: int  # slots, the last ones, whose memory can be given away for a while

    def address(self, slot: int) -> int:
        """Where a slot begins, for whoever reads it; one that is given away has no place."""

    def give(self) -> None:
        """The spare slots' memory is anybody's, once all copies are done; what was in it is lost."""

    def take(self) -> int:
        """Slots, the first of those that were given, that have memory again: another place than before, perhaps."""

    def mark(self) -> Mark:
        """All that the device has been given so far."""

    def copy(self, copies: Sequence[tuple[int, int]], after: Mark | None = None) -> Arrival:
        """Begins to copy records: (slot, address of the record in the region) each.

        They run in the order of their calls, and after the mark, or after all that the device was given before.
        """

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Zeroed host memory for a table that readers of the slots copy from."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies that were done when they were begun."""

    copying_ns: int

    def here(self) -> bool:
        """They are."""
        return True

    def join(self) -> None:
        """Nothing to wait for."""

    def took(self) -> Took:
        """Whoever computes has made them."""
        return Took(self.copying_ns, self.copying_ns)


class HostSlots:
    """Private memory of this process; a copy is done when the call returns."""

    swap_bytes = limits.SWAP_BYTES_PER_WINDOW
    spare = 0

    def __init__(self, slots: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._buffer = np.frombuffer(mmap.mmap(-1, max(1, slots) * record_bytes, mmap.MAP_PRIVATE), np.uint8)

    def address(self, slot: int) -> int:
        """In this process."""
        return self._buffer.ctypes.data + slot * self._record_bytes

    def give(self) -> None:
        """Nothing is spare."""

    def take(self) -> int:
        """Nothing was given."""
        return 0

    def mark(self) -> Mark:
        """All is done at once."""
        return None

    def copy(self, copies: Sequence[tuple[int, int]], after: Mark | None = None) -> Arrival:
        """Copies."""
        began_ns = time.perf_counter_ns()
        for slot, home in copies:
            ctypes.memmove(self.address(slot), home, self._record_bytes)
        return Copied(time.perf_counter_ns() - began_ns)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Plain memory."""
        return np.zeros(shape, dtype)
