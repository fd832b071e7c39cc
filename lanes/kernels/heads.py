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
    value = normed_rotated(x + row * x_row + head * x_head, d, norm, cos + row * P, sin + row * P, eps, D, P)
    tl.store(out + row * out_row + head * out_head + d, value, mask=d < D)


@triton.jit
def normed_rotated(x, d, norm, cos, sin, eps, D: tl.constexpr, P: tl.constexpr):
    """fp32 elements d of one head at x; norm, cos and sin are its own."""
    value = tl.load(x + d, mask=d < D, other=0.0)
    # The partner of a rotated element is loaded again instead of being fetched from another thread.
    other = tl.load(x + partner(d, P), mask=d < 2 * P, other=0.0)
    return rotated(value, other, d, norm, cos, sin, eps, D, P)


@triton.jit
def partner(d, P: tl.constexpr):
    """The element that d is rotated with, for d < 2P."""
    return tl.where(d < P, d + P, d - P)


@triton.jit
def rotated(value, other, d, norm, cos, sin, eps, D: tl.constexpr, P: tl.constexpr):
    """`value`, zero from D on, over its root mean square, weighted and rotated with `other`, its partner's value."""
    turns = d < 2 * P
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    value *= scale * tl.load(norm + d, mask=d < D, other=0.0)
    other *= scale * tl.load(norm + partner(d, P), mask=turns, other=0.0)
    low = d < P
    pair = tl.where(low, d, d - P)
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    return value * c + tl.where(low, -other, other) * s
