"""A Gated DeltaNet layer of a prompt's rows: what stands on either side of the rule, a launch each.

    mix      silu(conv) of q, k, v;  q and k normalised per head, q / sqrt(K): ready for lanes.kernels.delta_chunks
    finish   rms(o) * w * gate(z), rounded for the product behind it

Twin: lanes.models.qwen4_exp.deltanet, to rounding. Not here: the rule, decode windows (deltanet).
Invariant: a row's values depend on its own and the taps - 1 rows before it alone.

Letters: R rows, T taps, N value heads, A key heads, K key size, V value size, C channels (2AK + NV).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import delta_chunks
from lanes.kernels.deltanet import DeltaShape
from lanes.models.qwen4_exp.deltanet import L2_EPS

ROWS = 16  # of one program, of one head


def serves(shape: DeltaShape) -> bool:
    """Whether a layer has sizes that these kernels and those of the rule know."""
    return shape.key_dim == shape.value_dim and delta_chunks.serves(shape.key_dim, shape.value_dim)


def mix(shape: DeltaShape, qkv: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, mixed: torch.Tensor) -> None:
    """mixed fp32 [R, C]: q [A, K], k [A, K] and v [N, V] of every row. qkv fp32 [R, C], rows any distance apart, follow
    the rows `tail` [T - 1, C]; taps [T, C]."""
    rows, channels = mixed.shape
    assert serves(shape)
    assert qkv.shape == mixed.shape
    assert qkv.stride(1) == 1
    for each in (tail, taps, mixed):
        assert each.is_contiguous()
    _mix[(triton.cdiv(rows, ROWS), channels // shape.key_dim)](
        qkv, qkv.stride(0), tail, taps, mixed, rows, ROWS=ROWS, TAPS=shape.taps, A=shape.key_heads, D=shape.key_dim,
        C=channels, EPS=L2_EPS, num_warps=4,
    )  # fmt: skip


def finish(
    out: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, result: torch.Tensor, eps: float, *, silu: bool
) -> None:
    """result (any float) [R, N * V] from out fp32 [R, N, V] and z fp32 [R, N * V], whose rows stand at any distance."""
    rows, heads, value = out.shape
    assert out.is_contiguous()
    assert result.is_contiguous()
    assert z.stride(1) == 1
    _finish[(triton.cdiv(rows, ROWS), heads)](
        out, z, z.stride(0), norm, result, rows, eps, ROWS=ROWS, N=heads, V=value, SILU=silu, num_warps=4
    )


@triton.jit(do_not_specialize=["rows"])
def _mix(
    qkv, stride, tail, taps, mixed, rows, ROWS: tl.constexpr, TAPS: tl.constexpr, A: tl.constexpr, D: tl.constexpr,
    C: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    head, r = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = head * D + tl.arange(0, D)
    total = tl.zeros((ROWS, D), tl.float32)
    for t in tl.static_range(TAPS):
        place = r + t - (TAPS - 1)
        x = tl.load(
            qkv + place.to(tl.int64)[:, None] * stride + at[None, :], mask=((place >= 0) & (place < rows))[:, None],
            other=0.0,
        )  # fmt: skip
        x += tl.load(tail + (place + TAPS - 1)[:, None] * C + at[None, :], mask=(place < 0)[:, None], other=0.0)
        total += tl.load(taps + t * C + at)[None, :] * x
    total = total / (1.0 + tl.exp(-total))
    if head < 2 * A:
        total *= tl.rsqrt(tl.sum(total * total, axis=1) + EPS)[:, None]
        if head < A:
            total *= D**-0.5
    tl.store(mixed + r.to(tl.int64)[:, None] * C + at[None, :], total, mask=(r < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _finish(
    out, z, stride, norm, result, rows, eps, ROWS: tl.constexpr, N: tl.constexpr, V: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    head, r = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v, row, there = tl.arange(0, V), r.to(tl.int64), (r < rows)[:, None]
    at = (row * (N * V))[:, None] + (head * V + v)[None, :]
    o = tl.load(out + at, mask=there, other=0.0)
    o *= tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None]
    gate = tl.load(z + row[:, None] * stride + (head * V + v)[None, :], mask=there, other=0.0)
    gate = (gate if SILU else 1.0) / (1.0 + tl.exp(-gate))
    tl.store(result + at, o * tl.load(norm + v)[None, :] * gate, mask=there)
