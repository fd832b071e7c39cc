"""Small tables from the host's memory to the device's by a kernel: in the stream's own order, at the link's rate.

A copy of the same bytes would queue in the copy engine behind whatever else is under way there: a millisecond of
experts that come for the cache. Not here: large copies, which want that engine.

Invariant: the host changes a source only when no launch that reads it is under way. Sources are pinned; every launch
reads them anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_BYTES = 2048  # of one program: enough of them that the link is busy


def fetch(source: torch.Tensor, to: torch.Tensor) -> None:
    """to = source: contiguous, of one dtype and size; `source` is in pinned memory where `to` is on a GPU."""
    assert (source.dtype, source.shape) == (to.dtype, to.shape), (source.dtype, source.shape, to.dtype, to.shape)
    for each in (source, to):
        assert each.is_contiguous()
    count, block = to.numel(), _BLOCK_BYTES // to.element_size()
    _fetch[(triton.cdiv(count, block),)](source, to, count, BLOCK=block)


@triton.jit
def _fetch(source, to, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, mask=at < count, volatile=True), mask=at < count)
