"""A stream of copies beside the stream that computes; on a device "cpu" everything happens at once, in the same order.

Not here: what is copied. Invariant: the order of two things on different streams is said by an `Arrival` or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
from contextlib import AbstractContextManager

import torch

from lanes.experts.gpu import driver
from lanes.state.host import HERE, Arrival


class Event(Arrival):
    """When a stream has come as far as it was told to until now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        """Sleeps until then."""
        self._event.synchronize()

    def before_compute(self) -> None:
        """By the device alone."""
        torch.cuda.current_stream().wait_event(self._event)

    def before(self, stream: torch.cuda.Stream) -> None:
        """The same for another stream."""
        stream.wait_event(self._event)


class Side:
    """The copies' stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bind(self) -> None:
        """The calling thread has the device's context afterwards, which the driver's own calls need."""
        if self._stream is not None:
            self._stream.query()

    def here(self) -> AbstractContextManager[object]:
        """What torch is told within goes to the copies' stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after_compute(self) -> None:
        """Copies from here on come after all that computes until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def after(self, arrival: Arrival) -> None:
        """Copies from here on come after it."""
        if self._stream is not None and isinstance(arrival, Event):
            arrival.before(self._stream)

    def copy(self, to: int, source: int, size_bytes: int, *, pinned: bool = False) -> None:
        """Between two addresses, either side's; `pinned`: that of the host is registered."""
        if self._stream is None:
            ctypes.memmove(to, source, size_bytes)
        else:
            driver.copy(to, source, size_bytes, self._stream.cuda_stream, pinned=pinned)

    def copied(self) -> Arrival:
        """All copies until now."""
        return HERE if self._stream is None else Event(self._stream)

    def computed(self) -> Arrival:
        """All that computes until now."""
        return HERE if self._stream is None else Event(torch.cuda.current_stream())
