"""Hyper-connections of a prompt's rows: what stands between their two products, in three launches.

    enter    x += injection * block's result (of the block before);  n = rms(x_i) * w, rounded;  1 / rms kept
             low = Down n                                                              a product of the library's
    squash   silu(low[:L] / S);  injection = 2 sigmoid(low[L:] / S)
    lift     u = mean over streams of sigmoid(Up squashed)_i * n_i                     n from x and what was kept

The streams of 8,192 rows are 335 MB: they are read twice and written once, where operation by operation they crossed
eleven times. Twin: lanes.models.qwen4_exp.stream, to rounding. Not here: decode windows (stream).
Invariant: a row's results depend on the row alone.

Letters: R rows, S streams, H hidden, L low rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels.arithmetic import INTERPRETED

LIFT_ROWS, LIFT_COLUMNS, LIFT_STEP, LIFT_WARPS = (16, 32, 32, 4) if INTERPRETED else (64, 64, 64, 8)


def enter(
    x: torch.Tensor, owed: tuple[torch.Tensor, torch.Tensor] | None, norm: torch.Tensor, rounded: torch.Tensor,
    scale: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """rounded (any float) [R, S, H] = x fp32 [R, S, H] * scale * norm [S, H]; scale fp32 [R, S] = 1 / rms of each.

    Of `owed` (injection fp32 [R, S], result fp32 [R, H]) the product is added to x first, in place.
    """
    rows, streams, hidden = x.shape
    for each in (x, norm, rounded, scale, *(owed or ())):
        assert each.is_contiguous()
    injection, result = (scale, x) if owed is None else owed
    _enter[(rows, streams)](
        x, result, injection, norm, rounded, scale, eps, S=streams, H=hidden, HP=triton.next_power_of_2(hidden),
        OWED=owed is not None, num_warps=8,
    )  # fmt: skip


def squash(low: torch.Tensor, squashed: torch.Tensor, injection: torch.Tensor) -> None:
    """squashed (any float) [R, L] and injection fp32 [R, S] from low fp32 [R, L + S]."""
    rows, lowrank = squashed.shape
    streams = low.shape[1] - lowrank
    assert low.is_contiguous()
    assert injection.shape == (rows, streams)
    _squash[(rows,)](
        low, squashed, injection, L=lowrank, S=streams, P=triton.next_power_of_2(lowrank + streams), num_warps=4
    )


def lift(
    squashed: torch.Tensor, up: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, norm: torch.Tensor, u: torch.Tensor
) -> None:
    """u fp32 [R, H] from squashed [R, L], up [S * H, L] of its type, x fp32 [R, S, H] and what `enter` kept of it."""
    rows, streams, hidden = x.shape
    assert up.shape == (streams * hidden, squashed.shape[1])
    assert squashed.dtype == up.dtype
    for each in (squashed, up, x, scale, norm, u):
        assert each.is_contiguous()
    # Columns first: programs that run side by side share rows of the streams' cache lines and all of `up`.
    _lift[(triton.cdiv(hidden, LIFT_COLUMNS), triton.cdiv(rows, LIFT_ROWS))](
        squashed, up, x, scale, norm, u, rows, S=streams, H=hidden, L=squashed.shape[1], M=LIFT_ROWS, N=LIFT_COLUMNS,
        STEP=LIFT_STEP, num_warps=LIFT_WARPS, num_stages=3,
    )  # fmt: skip


@triton.jit
def _enter(
    x, result, injection, norm, rounded, scale, eps, S: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
    OWED: tl.constexpr,
):  # fmt: skip
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, HP)
    inside = h < H
    at = (row * S + stream) * H + h
    value = tl.load(x + at, mask=inside, other=0.0)
    if OWED:
        value += tl.load(injection + row * S + stream) * tl.load(result + row * H + h, mask=inside, other=0.0)
        tl.store(x + at, value, mask=inside)
    one = tl.rsqrt(tl.sum(value * value, axis=0) / H + eps)
    tl.store(scale + row * S + stream, one)
    value *= one * tl.load(norm + stream * H + h, mask=inside, other=0.0)
    tl.store(rounded + at, value, mask=inside)


@triton.jit
def _squash(low, squashed, injection, L: tl.constexpr, S: tl.constexpr, P: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    value = tl.load(low + row * (L + S) + n, mask=n < L + S, other=0.0) / S
    gate = 1.0 / (1.0 + tl.exp(-value))
    tl.store(squashed + row * L + n, value * gate, mask=n < L)
    tl.store(injection + row * S + n - L, 2.0 * gate, mask=(n >= L) & (n < L + S))


@triton.jit
def _lift(
    squashed, up, x, scale, norm, u, rows, S: tl.constexpr, H: tl.constexpr, L: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * N + tl.arange(0, N)
    r = tl.program_id(1) * M + tl.arange(0, M)
    row, d = r.to(tl.int64), tl.arange(0, STEP)
    there, known = (r < rows)[:, None], column < H
    a_at = squashed + row[:, None] * L + d[None, :]
    total = tl.zeros((M, N), tl.float32)
    for s in range(S):  # one after another: side by side they would not fit into registers
        n = s * H + column
        b_at = up + n[None, :] * L + d[:, None]
        mixed = tl.zeros((M, N), tl.float32)
        for first in range(0, L, STEP):
            inside = first + d < L
            a = tl.load(a_at + first, mask=there & inside[None, :], other=0.0)
            b = tl.load(b_at + first, mask=inside[:, None] & known[None, :], other=0.0)
            if INTERPRETED:  # which cannot multiply bf16, whose products fp32 holds exactly
                a, b = a.to(tl.float32), b.to(tl.float32)
            mixed = tl.dot(a, b, mixed, input_precision="ieee")
        value = tl.load(x + row[:, None] * (S * H) + n[None, :], mask=there & known[None, :], other=0.0)
        one = tl.load(scale + row * S + s, mask=r < rows, other=0.0)
        weight = tl.load(norm + n, mask=known, other=0.0)
        total += value * (one[:, None] * weight[None, :]) / (1.0 + tl.exp(-mixed))
    tl.store(u + row[:, None] * H + column[None, :], total / S, mask=there & known[None, :])
