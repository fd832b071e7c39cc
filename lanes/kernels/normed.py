"""Rows over their root mean square, times a weight, rounded for the product that reads them.

Twin: lanes.models.ops.rms. One launch and no memory but the result's, where torch's operations would leave rows of fp32
behind.

Letters: R rows, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early

_BLOCK = 2048  # of a row at once: eight values a thread


def normed(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """out (any float) [R, W] = rms of each row of x fp32 [R, W] * weight fp32 [W]; all contiguous."""
    rows, width = x.shape
    assert out.shape == x.shape
    assert weight.shape == (width,)
    for each in (x, weight, out):
        assert each.is_contiguous()
    _normed[(rows,)](
        x, weight, out, eps, W=width, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=8, **early.options()
    )


@triton.jit
def _normed(x, weight, out, eps, W: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    early.behind(EARLY)
    STEPS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    first, w = tl.program_id(0).to(tl.int64) * W, tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(STEPS):
        value = tl.load(x + first + i * BLOCK + w, mask=i * BLOCK + w < W, other=0.0)
        squares += value * value
    root = tl.rsqrt(tl.sum(squares, axis=0) / W + eps)
    for i in tl.static_range(STEPS):
        at, inside = i * BLOCK + w, i * BLOCK + w < W
        value = tl.load(x + first + at, mask=inside, other=0.0) * root * tl.load(weight + at, mask=inside, other=0.0)
        tl.store(out + first + at, value, mask=inside)
