"""A head made ready inside a kernel: root mean square, weight, rotation (lanes.kernels.attention).

Letters: D head size, P rotated pairs (the first 2P dimensions, pairs (i, i + P)).
"""

from __future__ import annotations

import triton
import triton.language as tl


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
