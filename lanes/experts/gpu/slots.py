"""Slots for expert records in the GPU's memory; copies from the pinned region run on a stream of their own.

Not here: which record has which slot (lanes.experts.cache). The caller's windows that read the old contents of a slot
have been enqueued on the current stream before `copy` is called, or before the mark that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import structlog
import torch

from lanes import limits
from lanes.experts.gpu import driver
from lanes.experts.slots import Mark, Took
from shared_experts.layout import align

_log = structlog.get_logger(__name__)
PIECE_SLOTS = 64
# From so many bytes on torch's allocator asks the driver for a segment of their own, in wholes of the second number. It
# goes back to the driver only once nothing lies in it: what is left at a piece's end must be nobody else's.
_OWN_SEGMENT_BYTES, _SEGMENT_BYTES = 10 << 20, 2 << 20


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
    """Implements `lanes.experts.slots.Slots`; all its memory is taken here and now, the spare slots' in pieces: what
    cannot be had again as a whole comes back in part."""

    swap_bytes = limits.GPU_SWAP_BYTES_PER_WINDOW

    def __init__(self, slots: int, record_bytes: int, device: torch.device, spare: int = 0) -> None:
        """Raises torch.OutOfMemoryError where there is no room."""
        self._record_bytes, self._device, self.spare = record_bytes, device, spare
        self._fixed = max(1, slots) - spare
        torch.cuda.empty_cache()  # else both may lie in one segment that somebody has left behind
        self._memory = self._room(self._fixed)
        self._pieces: list[torch.Tensor] = []  # PIECE_SLOTS each, the last one what is left
        self._stream = torch.cuda.Stream(device)
        self._tables: list[torch.Tensor] = []
        while (missing := spare - self._held) > 0:
            self._pieces.append(self._room(min(PIECE_SLOTS, missing)))

    @property
    def _held(self) -> int:
        """Spare slots that have memory."""
        return min(self.spare, len(self._pieces) * PIECE_SLOTS)

    def _room(self, slots: int) -> torch.Tensor:
        size_bytes = slots * self._record_bytes
        if size_bytes >= _OWN_SEGMENT_BYTES:
            size_bytes = align(size_bytes, _SEGMENT_BYTES)
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def address(self, slot: int) -> int:
        """On the device."""
        if slot < self._fixed:
            return self._memory.data_ptr() + slot * self._record_bytes
        piece, rest = divmod(slot - self._fixed, PIECE_SLOTS)
        return self._pieces[piece].data_ptr() + rest * self._record_bytes

    def _together(self, slot: int, home: int) -> bool:
        """Whether the memory of either is one with that of what is before it: no copy goes over the end of a tensor's.
        A record may come from a spare slot, and pieces may lie side by side."""
        begins = slot >= self._fixed and (slot - self._fixed) % PIECE_SLOTS == 0
        return not begins and all(home != piece.data_ptr() for piece in self._pieces)

    def give(self) -> None:
        """To torch's allocator, and from there to whoever asks the driver."""
        # The allocator knows nothing of the copies and kernels that use a piece on other streams.
        torch.cuda.synchronize(self._device)
        self._pieces.clear()
        torch.cuda.empty_cache()

    def take(self) -> int:
        """As many pieces as the allocator has or gets."""
        before = self._held
        torch.cuda.empty_cache()  # what passes have left behind, in sizes of theirs
        try:
            while (missing := self.spare - self._held) > 0:
                self._pieces.append(self._room(min(PIECE_SLOTS, missing)))
        except torch.OutOfMemoryError:
            _log.warning("slots_away", slots=self.spare - self._held)
        return self._held - before

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
        for slot, home, count in runs(copies, self._record_bytes, self._together):
            driver.copy(self.address(slot), home, count * self._record_bytes, self._stream.cuda_stream)
        ended.record(self._stream)
        return DeviceArrival(self._device, began, ended)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Pinned."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._tables.append(torch.zeros(size, dtype=torch.uint8, pin_memory=True))
        return self._tables[-1].numpy().view(dtype).reshape(shape)


def runs(
    copies: Sequence[tuple[int, int]], record_bytes: int,
    together: Callable[[int, int], bool] = lambda slot, home: True,
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """(slot, home, records) of neighbours on both sides, in order: one call of the driver instead of one a record.
    `together(slot, home)`: either's memory is one with that of what is before it."""
    at = 0
    while at < len(copies):
        slot, home = copies[at]
        count = 1
        while at + count < len(copies) and copies[at + count] == (slot + count, home + count * record_bytes):
            if not together(*copies[at + count]):
                break
            count += 1
        yield slot, home, count
        at += count
