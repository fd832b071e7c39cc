"""A CUDA graph of what a function launches. Not here: what is launched, or the run before it that compiles kernels.

Invariants: whatever happens, the calling thread's stream is afterwards the one that it was: after a failed capture
torch leaves it the stream of the capture. No garbage is collected meanwhile: an old graph that is freed while another
is captured makes the capture fail.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


def captured(
    launch: Callable[[], object], *, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """The graph; `launch` must have run before, with the same shapes and alignments."""
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream), _no_collection():  # torch collects once, before
            launch()
    finally:
        torch.cuda.set_stream(here)
    return graph


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
