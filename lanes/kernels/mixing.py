"""Hyper-connections of windows of few rows, in two launches between a block's result in the streams and the next input.

    lower    n = rms(x_i) * w;  low_i = Down_i n_i, of every stream on its own
    lift     squashed = silu(mean of low_i[:L]);  injection = 2 sigmoid(mean of low_i[L:])
             up = Up squashed;  u = mean over streams of sigmoid(up_i) * n_i

A block's result enters the streams where it is computed (products.inject). Products round their input to the type of
the matrix, so n, the squashed vector and u are. A program of lower makes a whole stream's n, all of lift's make the
squashed vector: what they read is in the cache, and a launch in front would cost more. Not here: more rows (stream).

Letters: R rows, M the power of two over R, S streams, H hidden, L low rank, N rows of a matrix in one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.products import write

LOWER_ROWS, LOWER_WARPS = 4, 4  # of Down in one program
LIFT_ROWS, LIFT_LANES = 8, 32  # of Up in one program, of one warp; lanes along one of them


def lower(
    x: torch.Tensor, norm: torch.Tensor, down: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, eps: float
) -> None:
    """low fp32 [R, S, at least W] and scale fp32 [R, S] from x fp32 [R, S, H], norm [S, H] and down [W, S * H], where
    W = L + S, or L where there is no injection."""
    rows, streams, hidden = x.shape
    count, lanes = down.shape[0], 32 * LOWER_WARPS
    _lower[(triton.cdiv(count, LOWER_ROWS), streams)](
        x, norm, down, low, scale, eps, R=rows, M=triton.next_power_of_2(rows), W=count, WIDE=low.shape[2], S=streams,
        H=hidden, LANES=lanes, N=LOWER_ROWS, num_warps=LOWER_WARPS, **early.options(),
    )  # fmt: skip


def lift(
    low: torch.Tensor, up: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor,
    injection: torch.Tensor, u: torch.Tensor, rounded: torch.Tensor, *, injects: bool = True,
) -> None:  # fmt: skip
    """u fp32 [R, H], rounded (any float) [R, H] and injection fp32 [R, S] from up [S * H, L] and what `lower` had and
    left."""
    rows, streams, hidden = x.shape
    padded = triton.next_power_of_2(streams)
    columns = max(1, LIFT_ROWS // padded)
    _lift[(triton.cdiv(hidden, columns),)](
        low, up, x, scale, norm, injection, u, rounded, R=rows, M=triton.next_power_of_2(rows), WIDE=low.shape[2],
        S=streams, SP=padded, H=hidden, L=up.shape[1], COLUMNS=columns, LANES=LIFT_LANES, INJECTS=injects, num_warps=1,
        **early.options(),
    )  # fmt: skip


@triton.jit
def _lower(
    x, norm, down, low, scale, eps, R: tl.constexpr, M: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr, H: tl.constexpr, LANES: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.open_next(EARLY)
    STEPS: tl.constexpr = (H + 4 * LANES - 1) // (4 * LANES)
    first, stream = tl.program_id(0) * N, tl.program_id(1)
    h, m, n = places(LANES, M, N)
    n += first
    down += stream * H
    norm += stream * H
    x += stream * H
    matrix, weight = (), ()
    for i in tl.static_range(STEPS):
        at = h + i * 4 * LANES
        matrix = matrix + (tl.load(down + n * (S * H) + at, mask=(n < W) & (at < H), other=0.0),)  # [LANES, 1, N, 4]
        weight = weight + (tl.load(norm + at, mask=at < H, other=0.0),)
    early.behind(EARLY)
    value = ()
    squares = tl.zeros((LANES, M, 1, 4), tl.float32)
    for i in tl.static_range(STEPS):
        at = h + i * 4 * LANES
        value = value + (tl.load(x + m * (S * H) + at, mask=(m < R) & (at < H), other=0.0),)
        squares += value[i] * value[i]
    root = tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=0) / H + eps)  # [M, 1]
    total = tl.zeros((LANES, M, N, 4), tl.float32)
    for i in tl.static_range(STEPS):
        normed = (value[i] * root[None, :, :, None] * weight[i]).to(down.dtype.element_ty)
        total += normed.to(tl.float32) * matrix[i].to(tl.float32)
    write(low + stream * WIDE, S * WIDE, first + tl.arange(0, N), tl.sum(tl.sum(total, axis=3), axis=0), W, R, M)
    if first == 0:
        r = tl.arange(0, M)
        tl.store(scale + r * S + stream, tl.reshape(root, (M,)), mask=r < R)


@triton.jit
def places(LANES: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """(columns [LANES, 1, 1, 4], m [1, M, 1, 1], n [1, 1, N, 1]): four columns a thread of both types, so that no value
    changes threads before it is summed."""
    h = tl.arange(0, LANES)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    return h, tl.arange(0, M)[None, :, None, None], tl.arange(0, N)[None, None, :, None]


@triton.jit
def _mean(low, at, known, WIDE: tl.constexpr, S: tl.constexpr):
    """Of all streams' low[at]."""
    total = tl.load(low + at, mask=known, other=0.0)
    for s in tl.static_range(1, S):
        total += tl.load(low + at + s * WIDE, mask=known, other=0.0)
    return total / S


@triton.jit
def _lift(
    low, up, x, scale, norm, injection, u, rounded, R: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, H: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    INJECTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.open_next(EARLY)
    STEPS: tl.constexpr = (L + 4 * LANES - 1) // (4 * LANES)
    N: tl.constexpr = SP * COLUMNS
    # All streams of some columns: row s * COLUMNS + i of the tile is stream s, column first + i.
    first = tl.program_id(0) * COLUMNS
    d, row, i_n = places(LANES, M, N)
    up_at = (i_n // COLUMNS * H + first + i_n % COLUMNS) * L
    here = (i_n // COLUMNS < S) & (first + i_n % COLUMNS < H)
    matrix = ()
    for i in tl.static_range(STEPS):
        at = d + i * 4 * LANES
        matrix = matrix + (tl.load(up + up_at + at, mask=here & (at < L), other=0.0),)  # [LANES, 1, N, 4]
    h, stream = first + tl.arange(0, N) % COLUMNS, tl.arange(0, N) // COLUMNS
    known = (stream < S) & (h < H)
    n = stream * H + h
    weight = tl.load(norm + n, mask=known, other=0.0)
    early.behind(EARLY)
    m = tl.arange(0, M)
    inside = (m < R)[:, None] & known[None, :]
    normed = tl.load(x + m[:, None] * (S * H) + n[None, :], mask=inside, other=0.0)
    normed *= tl.load(scale + m[:, None] * S + stream[None, :], mask=inside, other=0.0)
    total = tl.zeros((LANES, M, N, 4), tl.float32)
    for i in tl.static_range(STEPS):
        at = d + i * 4 * LANES
        value = _mean(low, row * (S * WIDE) + at, (row < R) & (at < L), WIDE, S)
        value = (value / (1.0 + tl.exp(-value))).to(up.dtype.element_ty)
        total += value.to(tl.float32) * matrix[i].to(tl.float32)
    mixed = 1.0 / (1.0 + tl.exp(-tl.sum(tl.sum(total, axis=3), axis=0)))
    mixed *= normed * weight[None, :]  # [M, N]
    value = tl.sum(tl.reshape(mixed, (M, SP, COLUMNS)), axis=1) / S
    column = first + tl.arange(0, COLUMNS)
    write(u, H, column, value, H, R, M)
    write(rounded, H, column, value, H, R, M)
    if INJECTS:
        if first == 0:
            s = tl.arange(0, SP)[None, :]
            gate = _mean(low, m[:, None] * (S * WIDE) + L + s, (m < R)[:, None] & (s < S), WIDE, S)
            tl.store(injection + m[:, None] * S + s, 2.0 / (1.0 + tl.exp(-gate)), mask=(m < R)[:, None] & (s < S))
