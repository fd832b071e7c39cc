"""Small tables from the host's memory to the device's by a kernel: in the stream's own order, at the link's rate.

A copy of the same bytes would queue in the copy engine behind whatever else is under way there: a millisecond of
experts that come for the cache. Also the row that a chosen place names, which the host need not know then. Not here:
large copies, which want that engine.

Invariant: the host changes a source only when no launch that reads it is under way. Sources are pinned; every launch
reads them anew.

Letters: V vocabulary, D places that name one of its tokens, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early

_BLOCK_BYTES = 2048  # of one program: enough of them that the link is busy
_BLOCK = 1024  # values of a row that one program fetches


def fetch(source: torch.Tensor, to: torch.Tensor) -> None:
    """to = source: contiguous, of one dtype and size; `source` is in pinned memory where `to` is on a GPU."""
    assert (source.dtype, source.shape) == (to.dtype, to.shape), (source.dtype, source.shape, to.dtype, to.shape)
    for each in (source, to):
        assert each.is_contiguous()
    count, block = to.numel(), _BLOCK_BYTES // to.element_size()
    _fetch[(triton.cdiv(count, block),)](source, to, count, BLOCK=block)


def fetch_named(place: torch.Tensor, tokens: torch.Tensor | None, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 [W] = row t of matrix [V, W], bf16 or fp32, where t is what place int64 [1] names: tokens[place] of
    int64 [D], or itself without a table; zeros where it is -1. `place` and `matrix` may be pinned memory."""
    assert out.shape == matrix.shape[1:]
    assert place.dtype == torch.int64
    for each in (matrix, out):
        assert each.is_contiguous()
    halves = matrix.dtype == torch.bfloat16
    assert halves or matrix.dtype == torch.float32
    _fetch_named[(triton.cdiv(len(out), _BLOCK),)](
        place, place if tokens is None else tokens, matrix.view(torch.int16) if halves else matrix, out, W=len(out),
        BLOCK=_BLOCK, NARROW=tokens is not None, HALVES=halves, num_warps=4, **early.options(),
    )  # fmt: skip


@triton.jit
def _fetch(source, to, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, mask=at < count, volatile=True), mask=at < count)


@triton.jit
def _fetch_named(
    place, tokens, matrix, out, W: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr, HALVES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(place, volatile=True)
    named = token >= 0
    if NARROW:
        token = tl.load(tokens + token, mask=named, other=0)
    x = tl.load(matrix + token * W + w, mask=(w < W) & named, other=0)
    if HALVES:  # a bf16 is the upper half of an fp32
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(out + w, x, mask=w < W)
