"""What may come to the L2 cache while a layer waits for experts that miss: the matrix that the next block reads first.

Memory has nothing to do meanwhile. Not here: when it is sent for (lanes.kernels.experts). Invariant: plans name bytes
of matrices that outlive the window.
"""

from __future__ import annotations

import torch

from lanes.kernels.products import tile

PART = 0.6  # of the L2 cache: of an H200's 60 MiB, 36 were better than 30, and 40 no better than 32


def plan(matrix: torch.Tensor, part: float = PART) -> torch.Tensor | None:
    """int64 [N, 2] (address, bytes) on the matrix's device: every so many-th program's rows of its product with one
    row, so that cache and memory are read side by side. None where there is no such cache or matrix."""
    if not matrix.is_cuda:
        return None
    return pieces(matrix, int(part * torch.cuda.get_device_properties(matrix.device).L2_cache_size))


def pieces(matrix: torch.Tensor, most_bytes: int) -> torch.Tensor | None:
    """`plan` of at most so many bytes."""
    each = tile(matrix, 1).rows * matrix.shape[1] * matrix.element_size()
    there = matrix.shape[0] * matrix.shape[1] * matrix.element_size() // each
    count = min(there, most_bytes // each)
    if not count or each % 16 or matrix.data_ptr() % 16 or not matrix.is_contiguous():
        return None
    at = torch.arange(count) * there // count * each + matrix.data_ptr()
    return torch.stack((at, torch.full_like(at, each)), dim=1).to(matrix.device)
