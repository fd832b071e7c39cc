"""Slots for expert records in the GPU's memory; copies from the pinned region run on a stream of their own.

Not here: which record has which slot (lanes.experts.cache). The caller's windows that read the old contents of a slot
have been enqueued on the current stream before `copy` is called, or before the mark that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.experts.gpu import driver
from lanes.experts.slots import Mark, Took


class DeviceArrival:
    """Implements `lanes.experts.slots.Arrival`."""

    def __init__(self, device: torch.device, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._device, self._began, self._ended = device, began, ended
        self._wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def here(self) -> bool:
        """By the side stream's event."""
        return bool(self._ended.query())

    def join(self) -> None:
        """The current stream waits, between two events that tell how long."""
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._ended)
        after.record(stream)
        self._wait = before, after

    def took(self) -> Took:
        """By the device's clock; nothing of what is still under way."""
        if not self._ended.query():
            return Took()
        waited_ms = 0.0
        if self._wait is not None and self._wait[1].query():
            waited_ms = self._wait[0].elapsed_time(self._wait[1])
        return Took(round(self._began.elapsed_time(self._ended) * 1e6), round(waited_ms * 1e6))


class DeviceSlots:
    """Implements `lanes.experts.slots.Slots`; all its memory is taken here and now."""

    swap_bytes = limits.GPU_SWAP_BYTES_PER_WINDOW

    def __init__(self, slots: int, record_bytes: int, device: torch.device) -> None:
        self._record_bytes, self._device = record_bytes, device
        self._memory = torch.empty(max(1, slots) * record_bytes, dtype=torch.uint8, device=device)
        self._first = self._memory.data_ptr()
        self._stream = torch.cuda.Stream(device)
        self._tables: list[torch.Tensor] = []

    def address(self, slot: int) -> int:
        """On the device."""
        return self._first + slot * self._record_bytes

    def mark(self) -> Mark:
        """An event of the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, copies: Sequence[tuple[int, int]], after: Mark | None = None) -> DeviceArrival:
        """Enqueues on the side stream, after the mark or after what the current stream has been given."""
        mark = self.mark() if after is None else after
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(self._stream)
        for slot, home, count in runs(copies, self._record_bytes):
            driver.copy(self.address(slot), home, count * self._record_bytes, self._stream.cuda_stream)
        ended.record(self._stream)
        return DeviceArrival(self._device, began, ended)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Pinned."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._tables.append(torch.zeros(size, dtype=torch.uint8, pin_memory=True))
        return self._tables[-1].numpy().view(dtype).reshape(shape)


def runs(copies: Sequence[tuple[int, int]], record_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(slot, home, records) of neighbours on both sides, in order: one call of the driver instead of one a record."""
    at = 0
    while at < len(copies):
        slot, home = copies[at]
        count = 1
        while at + count < len(copies) and copies[at + count] == (slot + count, home + count * record_bytes):
            count += 1
        yield slot, home, count
        at += count
