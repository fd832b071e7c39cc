"""Hyper-connections of a decode window, in three launches.

    enter    x += injection * block's result (of the block before);  n = rms(x_i) * w        one pass over the streams
    lower    low = Down n;  silu(low[:L] / S);  injection = 2 sigmoid(low[L:] / S)
    lift     up = Up squashed;  u = mean over streams of sigmoid(up_i) * n_i

Products round their input to the type of the matrix, so n, the squashed vector and u are written in that type; n is
read again in fp32 at the end, so it is kept in fp32 too.

Letters: R rows, S streams, H hidden, L low rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.products import dots, tile, write


def enter(
    x: torch.Tensor, result: torch.Tensor, injection: torch.Tensor, norm: torch.Tensor, normed: torch.Tensor,
    rounded: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """x fp32 [R, S, H] += injection fp32 [R, S] * result fp32 [R, H], in place; normed fp32 and rounded (any float) of
    the same shape = rms of every stream * norm [S, H]."""
    rows, streams, hidden = x.shape
    _enter[(streams, rows)](
        x, result, injection, norm, normed, rounded, eps, S=streams, H=hidden, HP=triton.next_power_of_2(hidden),
        num_warps=8, **early.options(),  # ten values a thread at 2,560: one program a stream, its sum in one pass
    )  # fmt: skip


def lower(rounded: torch.Tensor, down: torch.Tensor, squashed: torch.Tensor, injection: torch.Tensor) -> None:
    """squashed (any float) [R, L] and injection fp32 [R, S] from rounded [R, S, H] and down [L + S, S * H].

    Where down is [L, S * H] there is no injection, and nothing is written to it.
    """
    rows, streams, hidden = rounded.shape
    t = tile(down, rows)
    _lower[(triton.cdiv(down.shape[0], t.rows),)](
        rounded, down, squashed, injection, R=rows, M=t.padded, W=down.shape[0], L=squashed.shape[1], S=streams,
        N=t.rows, D=streams * hidden, STEP=t.step, num_warps=t.warps, **early.options(),
    )  # fmt: skip


def lift(
    squashed: torch.Tensor, up: torch.Tensor, normed: torch.Tensor, u: torch.Tensor, rounded: torch.Tensor
) -> None:  # fmt: skip
    """u fp32 [R, H] and rounded (any float) [R, H] from squashed [R, L], up [S * H, L] and normed fp32 [R, S, H]."""
    rows, streams, hidden = normed.shape
    padded = triton.next_power_of_2(streams)
    t = tile(up, rows)
    columns = max(1, t.rows // padded)
    _lift[(triton.cdiv(hidden, columns),)](
        squashed, up, normed, u, rounded, R=rows, M=t.padded, S=streams, SP=padded, H=hidden, COLUMNS=columns,
        D=squashed.shape[1], STEP=t.step, num_warps=t.warps, **early.options(),
    )  # fmt: skip


@triton.jit
def _lower(
    rounded, down, squashed, injection, R: tl.constexpr, M: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    low = dots(rounded, D, down, n, W, R, M, D, STEP, EARLY) / S  # [M, N]
    gate = 1.0 / (1.0 + tl.exp(-low))
    write(squashed, L, n, low * gate, L, R, M)
    if W > L:
        m = tl.arange(0, M)
        at = m[:, None] * S + (n - L)[None, :]
        tl.store(injection + at, 2.0 * gate, mask=(m < R)[:, None] & (n >= L)[None, :] & (n < W)[None, :])


@triton.jit
def _lift(
    squashed, up, normed, u, rounded, R: tl.constexpr, M: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    H: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # All streams of some columns: row s * COLUMNS + i of the tile is stream s, column first + i.
    h = tl.program_id(0) * COLUMNS + tl.arange(0, SP * COLUMNS) % COLUMNS
    stream = tl.arange(0, SP * COLUMNS) // COLUMNS
    known = (stream < S) & (h < H)
    n = tl.where(known, stream * H + h, S * H)  # past the matrix: zeros
    mixed = 1.0 / (1.0 + tl.exp(-dots(squashed, D, up, n, S * H, R, M, D, STEP, EARLY)))  # [M, SP * COLUMNS]
    m = tl.arange(0, M)
    mixed *= tl.load(normed + m[:, None] * (S * H) + n[None, :], mask=(m < R)[:, None] & known[None, :], other=0.0)
    value = tl.sum(tl.reshape(mixed, (M, SP, COLUMNS)), axis=1) / S
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    write(u, H, column, value, H, R, M)
    write(rounded, H, column, value, H, R, M)


@triton.jit
def _enter(
    x, result, injection, norm, normed, rounded, eps, S: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    stream, row = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, HP)
    inside = h < H
    at = (row * S + stream) * H + h
    weight = tl.load(norm + stream * H + h, mask=inside, other=0.0)
    early.behind(EARLY)
    value = tl.load(x + at, mask=inside, other=0.0)
    share = tl.load(injection + row * S + stream)
    value += share * tl.load(result + row * H + h, mask=inside, other=0.0)
    tl.store(x + at, value, mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    value *= weight
    tl.store(normed + at, value, mask=inside)
    tl.store(rounded + at, value, mask=inside)
