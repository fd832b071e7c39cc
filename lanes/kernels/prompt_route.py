"""Router logits of a prompt's rows to ids and weights, a row a warp, as lanes.kernels.route chooses in a window.

Twin: `lanes.models.qwen4_exp.moe.route`, to rounding; equal logits: the lowest id wins. Not here: the router's product,
who goes where (places).

Invariant: ids are distinct, in range and ascending in a row whatever the logits are, NaN included (NaN ranks highest).

Letters: R rows, E experts, K experts per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 1  # of one program, a warp: the K searches need no barrier


def route(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, normalise: bool) -> None:
    """ids int32 [R, K] and weights fp32 [R, K] from logits fp32 [R, E], rows any distance apart."""
    (rows, experts), chosen = logits.shape, ids.shape[1]
    assert logits.stride(1) == 1
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert chosen <= experts
    _route[(triton.cdiv(rows, ROWS),)](
        logits, logits.stride(0), ids, weights, rows, ROWS=ROWS, K=chosen, E=experts,
        EP=triton.next_power_of_2(experts), NORMALISE=normalise, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits, stride, ids, weights, rows, ROWS: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    r, e = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, EP)
    row, there = r.to(tl.int64), r < rows
    inside = there[:, None] & (e < E)[None, :]
    x = tl.load(logits + row[:, None] * stride + e[None, :], mask=inside, other=float("-inf"))  # [ROWS, EP]
    x = tl.where(there[:, None], x, 0.0)
    chosen = greatest(x, inside, e, K, EP)
    highest = tl.max(x, axis=1)
    p = tl.exp(x - highest[:, None])
    total = tl.sum(tl.where(chosen, p, 0.0), axis=1) if NORMALISE else tl.sum(p, axis=1)
    total = tl.where(there, total, 1.0)
    pair = row[:, None] * K + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(ids + pair, e[None, :] + tl.zeros((ROWS, EP), tl.int32), mask=chosen)
    tl.store(weights + pair, p / total[:, None], mask=chosen)


@triton.jit
def greatest(x, inside, e, K: tl.constexpr, EP: tl.constexpr):
    """Which of x [R, EP] are a row's K greatest, of those `inside`; of equal ones the lowest e."""
    # Ordered as values are; + 0.0 makes -0 equal to 0. Two searches of 32 bits, the greatest and the lowest id that has
    # it, each take a warp one instruction where one search of 64 takes ten.
    least: tl.constexpr = -(1 << 31)  # of no value
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    left = tl.where(inside, bits, least)
    for _ in tl.static_range(K):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], e[None, :], EP), axis=1)
        left = tl.where(e[None, :] == first[:, None], least, left)
    return (left == least) & inside
