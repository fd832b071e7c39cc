"""Slots for expert records in the GPU's memory; copies from the pinned region run on a stream of their own.

Not here: which record has which slot (lanes.experts.cache). The caller's windows that read the old contents of a slot
have been enqueued on the current stream before `copy` is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.experts.gpu import driver
from lanes.experts.slots import Done


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

    def copy(self, copies: Sequence[tuple[int, int]]) -> Done:
        """Enqueues on the side stream, after what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for slot, home in copies:
            driver.copy(self.address(slot), home, self._record_bytes, self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def join(self) -> None:
        """The current stream waits for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """Pinned."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._tables.append(torch.zeros(size, dtype=torch.uint8, pin_memory=True))
        return self._tables[-1].numpy().view(dtype).reshape(shape)
