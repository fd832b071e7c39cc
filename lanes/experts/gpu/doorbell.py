"""Two ways for a layer to ring the CPU's doorbell and to wait for its answer; both can be captured in a graph.

    KernelWords    programs of the launches beside which they happen (lanes.kernels.doorbell); the only way on "cpu"
    StreamWords    the stream writes and awaits the words itself: no multiprocessor is held

Which one works on a GPU is found out at start (probe). Not here: the words' meaning (lanes/native/share.h).
"""

from __future__ import annotations

from typing import Protocol

import torch

from lanes.experts.gpu import driver
from lanes.kernels.doorbell import Word


class Doorbell(Protocol):
    """Of one block."""

    name: str

    def ring(self, number: int) -> Word | None:
        """The doorbell becomes `number` after all that is enqueued: by the next launch, which is given the word, or by
        the stream."""

    def answered(self, number: int) -> Word | None:
        """What the next launch is to wait for beside its work, so that nothing behind it runs before the done word is
        at least `number`; None where the stream waits (`wait`)."""

    def wait(self, number: int) -> None:
        """Enqueues what `answered` has left undone."""


class StreamWords:
    """Stream memory operations of the driver."""

    name = "stream"

    def __init__(self, rung: torch.Tensor, done: torch.Tensor) -> None:
        self._rung, self._done = rung.data_ptr(), done.data_ptr()

    def ring(self, number: int) -> None:
        """A write."""
        driver.write_word(torch.cuda.current_stream().cuda_stream, self._rung, number)

    def answered(self, number: int) -> None:
        """Nothing."""

    def wait(self, number: int) -> None:
        """A wait."""
        driver.await_word(torch.cuda.current_stream().cuda_stream, self._done, number)


class KernelWords:
    """Words for launches; rung and done are int64 [1] in mapped host memory."""

    name = "kernel"

    def __init__(self, rung: torch.Tensor, done: torch.Tensor) -> None:
        self._rung, self._done = rung, done

    def ring(self, number: int) -> Word:
        """For the next launch."""
        return Word(self._rung, number)

    def answered(self, number: int) -> Word:
        """For the next launch."""
        return Word(self._done, number)

    def wait(self, number: int) -> None:
        """Nothing."""
