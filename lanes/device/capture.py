"""A CUDA graph of what a function launches. Not here: what is launched, or the run before it that compiles kernels.

Invariant: whatever happens, the calling thread's stream is afterwards the one that it was: after a failed capture torch
leaves it the stream of the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(
    launch: Callable[[], object], *, pool: Any = None, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """The graph; `launch` must have run before, with the same shapes and alignments."""
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            launch()
    finally:
        torch.cuda.set_stream(here)
    return graph
