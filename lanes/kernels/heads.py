"""Attention's heads made ready in a decode window: root mean square, weight, rotation; one program a head and row.

Used for queries, keys and the indexer's queries, read where the projection left them. Not here: the products, the
attention. Letters: R rows, A heads, D head size, P rotated pairs (the first 2P dimensions, pairs (i, i + P)).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def norm_rotate(
    x: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """out [R, A, D] (any float, any strides but D's) from x fp32 [R, A, D] (the same), norm [D], cos and sin [R, P]."""
    rows, heads, size = x.shape
    assert x.stride(2) == out.stride(2) == 1, "elements of a head lie side by side"
    _norm_rotate[(heads, rows)](
        x, x.stride(0), x.stride(1), norm, cos, sin, out, out.stride(0), out.stride(1), eps, D=size,
        DP=triton.next_power_of_2(size), P=cos.shape[1], num_warps=1,  # 256 elements are eight a thread
    )  # fmt: skip


@triton.jit
def _norm_rotate(
    x, x_row, x_head, norm, cos, sin, out, out_row, out_head, eps, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    inside = d < D
    at = x + row * x_row + head * x_head
    value = tl.load(at + d, mask=inside, other=0.0)
    # The partner of a rotated element is loaded again instead of being fetched from another thread.
    rotated = d < 2 * P
    low = d < P
    partner = tl.where(low, d + P, d - P)
    other = tl.load(at + partner, mask=rotated, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    value *= scale * tl.load(norm + d, mask=inside, other=0.0)
    other *= scale * tl.load(norm + partner, mask=rotated, other=0.0)
    pair = tl.where(low, d, d - P)
    c = tl.load(cos + row * P + pair, mask=rotated, other=1.0)
    s = tl.load(sin + row * P + pair, mask=rotated, other=0.0)
    tl.store(out + row * out_row + head * out_head + d, value * c + tl.where(low, -other, other) * s, mask=inside)
