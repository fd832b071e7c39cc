"""Windows captured as CUDA graphs, some for each number of rows, and replayed.

Not here: what a window launches, how it is parted. Invariant: a replay does what `run` would, bit for bit: the same
launches, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from lanes.device.capture import captured
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS


class Window(Protocol):
    """What is captured."""

    parts: int

    def run(self, rows: int) -> None:
        """Enqueues a window."""

    def run_part(self, rows: int, part: int) -> None:
        """Enqueues a part of it."""

    def settle(self) -> None:
        """Enqueues what brings the state up to date."""


class Graphs:
    """Captured once the window and everything that it reads exist, before any sequence does."""

    def __init__(self, window: Window, device: torch.device, warm: Callable[[Callable[[], None]], None]) -> None:
        """`warm(run)` runs a window once and awaits it: kernels are compiled there, which capturing cannot."""
        self._windows: list[list[torch.cuda.CUDAGraph]] = []
        self.parts = window.parts
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for rows in range(1, MOST_ROWS + 1):
                warm(functools.partial(window.run, rows))
            window.settle()
        torch.cuda.synchronize(device)

        for rows in range(1, MOST_ROWS + 1):
            launches = [functools.partial(window.run_part, rows, part) for part in range(window.parts)]
            self._windows.append([captured(launch, pool=pool, stream=stream) for launch in launches])
        self._settling = captured(window.settle, pool=pool, stream=stream)

    def run_part(self, rows: int, part: int) -> None:
        """Enqueues the graph of a window's part."""
        self._windows[rows - 1][part].replay()

    def settle(self) -> None:
        """Enqueues the graph that brings the state up to date."""
        self._settling.replay()
