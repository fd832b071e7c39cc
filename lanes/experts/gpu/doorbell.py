"""Two ways for a stream to ring the CPU's doorbell and to wait for its answer; both can be captured in a graph.

    KernelWords    two small kernels (lanes.kernels.doorbell); the only way on device "cpu"
    StreamWords    the stream writes and awaits the words itself: no multiprocessor is held

Which one works on a GPU is found out at start (probe). Not here: the words' meaning (lanes/native/share.h).
"""

from __future__ import annotations

from typing import Protocol

import torch

from lanes.experts.gpu import driver
from lanes.kernels import doorbell


class Doorbell(Protocol):
    """Of one block."""

    name: str

    def ring(self, number: int) -> None:
        """Enqueues on the current stream: the doorbell becomes `number`, after all before it."""

    def wait(self, number: int) -> None:
        """Enqueues on the current stream: nothing after it runs before the done word is at least `number`."""


class StreamWords:
    """Stream memory operations of the driver."""

    name = "stream"

    def __init__(self, rung: torch.Tensor, done: torch.Tensor) -> None:
        self._rung, self._done = rung.data_ptr(), done.data_ptr()

    def ring(self, number: int) -> None:
        """A write."""
        driver.write_word(torch.cuda.current_stream().cuda_stream, self._rung, number)

    def wait(self, number: int) -> None:
        """A wait."""
        driver.await_word(torch.cuda.current_stream().cuda_stream, self._done, number)


class KernelWords:
    """Kernels; rung and done are int64 [1] in mapped host memory."""

    name = "kernel"

    def __init__(self, rung: torch.Tensor, done: torch.Tensor) -> None:
        self._rung, self._done = rung, done

    def ring(self, number: int) -> None:
        """A launch."""
        doorbell.ring(self._rung, number)

    def wait(self, number: int) -> None:
        """A launch."""
        doorbell.wait(self._done, number)
