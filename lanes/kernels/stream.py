"""Hyper-connections of a decode window between the matrix products, each step one launch.

    enter    x += injection * block's result (of the block before);  n = rms(x_i) * w        one pass over the streams
    (low = Down n: a product)
    squash   silu(low[:L] / S) for the next product;  injection = 2 sigmoid(low[L:] / S)
    (up = Up squashed: a product)
    mix      u = mean over streams of sigmoid(up_i) * n_i

Products round their input to the type of the matrix, so n, the squashed vector and u are written in that type; `mix`
reads n in fp32, so it is kept in fp32 too. Not here: the products.

Letters: R rows, S streams, H hidden, L low rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MIX_COLUMNS = 256  # of one program of mix: ten a row of 2,560


def enter(
    x: torch.Tensor, result: torch.Tensor, injection: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor,
    rounded: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """x fp32 [R, S, H] += injection fp32 [R, S] * result fp32 [R, H], in place; normed fp32 and rounded (any float) of
    the same shape = rms of every stream * norm [S, H]."""
    rows, streams, hidden = x.shape
    _enter[(streams, rows)](
        x, result, injection, norm, normed, rounded, eps, S=streams, H=hidden, HP=triton.next_power_of_2(hidden),
        num_warps=8,  # ten values a thread at 2,560: one program a stream, its sum in one pass
    )  # fmt: skip


def squash(low: torch.Tensor, squashed: torch.Tensor, injection: torch.Tensor) -> None:
    """low fp32 [R, L + S] (or [R, L]: no injection) to squashed (any float) [R, L] and injection fp32 [R, S]."""
    rows, lowrank = squashed.shape
    streams = injection.shape[1]
    _squash[(rows,)](
        low, squashed, injection, W=low.shape[1], L=lowrank, LP=triton.next_power_of_2(lowrank), S=streams,
        SP=triton.next_power_of_2(streams), INJECTS=low.shape[1] > lowrank, num_warps=2,
    )  # fmt: skip


def mix(up: torch.Tensor, normed: torch.Tensor, u: torch.Tensor, rounded: torch.Tensor) -> None:
    """u fp32 [R, H] and rounded (any float) [R, H] = mean over streams of sigmoid(up) * normed, both fp32 [R, S, H]."""
    rows, streams, hidden = normed.shape
    _mix[(triton.cdiv(hidden, MIX_COLUMNS), rows)](
        up, normed, u, rounded, S=streams, H=hidden, COLUMNS=MIX_COLUMNS, num_warps=2
    )


@triton.jit
def _enter(
    x, result, injection, norm, normed, rounded, eps, S: tl.constexpr, H: tl.constexpr, HP: tl.constexpr
):  # fmt: skip
    stream, row = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, HP)
    inside = h < H
    at = (row * S + stream) * H + h
    value = tl.load(x + at, mask=inside, other=0.0)
    share = tl.load(injection + row * S + stream)
    value += share * tl.load(result + row * H + h, mask=inside, other=0.0)
    tl.store(x + at, value, mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    value *= tl.load(norm + stream * H + h, mask=inside, other=0.0)
    tl.store(normed + at, value, mask=inside)
    tl.store(rounded + at, value, mask=inside)


@triton.jit
def _squash(
    low, squashed, injection, W: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    INJECTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, LP)
    value = tl.load(low + row * W + i, mask=i < L, other=0.0) / S
    tl.store(squashed + row * L + i, value / (1.0 + tl.exp(-value)), mask=i < L)
    if INJECTS:
        s = tl.arange(0, SP)
        value = tl.load(low + row * W + L + s, mask=s < S, other=0.0) / S
        tl.store(injection + row * S + s, 2.0 / (1.0 + tl.exp(-value)), mask=s < S)


@triton.jit
def _mix(up, normed, u, rounded, S: tl.constexpr, H: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < H
    total = tl.zeros((COLUMNS,), tl.float32)
    for s in tl.static_range(S):
        m = tl.load(up + (row * S + s) * H + at, mask=inside, other=0.0)
        total += tl.load(normed + (row * S + s) * H + at, mask=inside, other=0.0) / (1.0 + tl.exp(-m))
    tl.store(u + row * H + at, total / S, mask=inside)
    tl.store(rounded + row * H + at, total / S, mask=inside)
