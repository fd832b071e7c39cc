"""An n-gram layer of a window, between its product and the streams: what it adds, in three launches.

    settle     the tail's rows, then those of the last window that were accepted: the last B of them are the tail
    gate       gated = sigmoid(gate of key and streams) * value;  x += gated;  pending = rms(gated) * w, of every stream
    convolve   x += silu(taps over tail and pending, `dilation` rows apart)

Twin: lanes.models.qwen4_exp.ngram, to rounding. Not here: the product, rows of the table.
Invariant: `settle` comes before `gate`, which overwrites the last window's rows.

Letters: R rows, S streams, H hidden, W = S * H, B rows of the tail, T taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early

_COLUMNS = 64  # of one program, one a thread: the tail waits in registers while it moves


def settle(tail: torch.Tensor, pending: torch.Tensor, accepted: torch.Tensor) -> None:
    """tail fp32 [B, W] moves on by `accepted` int32 [1] rows of pending fp32 [at least that many, W]."""
    width = tail.shape[1]
    for each in (tail, pending):
        assert each.is_contiguous()
        assert each.shape[1] == width
    block = min(_COLUMNS, triton.next_power_of_2(width))
    _settle[(triton.cdiv(width, block),)](
        tail, pending, accepted, B=tail.shape[0], W=width, BLOCK=block, num_warps=2, **early.options()
    )


def gate(
    x: torch.Tensor, key_value: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pending: torch.Tensor, eps: float, least: float,
) -> None:  # fmt: skip
    """x fp32 [R, S, H], in place, and pending fp32 [at least R, W] from key_value fp32 [R, W + H]; norms [S, H] of key,
    streams and convolution; `least` is the smallest absolute value of a gate."""
    rows, streams, hidden = x.shape
    for each in (x, key_value, pending, *norms):
        assert each.is_contiguous()
    assert key_value.shape == (rows, (streams + 1) * hidden)
    _gate[(streams, rows)](
        x, key_value, *norms, pending, eps, least, hidden**-0.5, S=streams, H=hidden,
        HP=triton.next_power_of_2(hidden), num_warps=8, **early.options(),
    )  # fmt: skip


def convolve(x: torch.Tensor, tail: torch.Tensor, pending: torch.Tensor, taps: torch.Tensor, dilation: int) -> None:
    """x fp32 [R, W] += silu of `pending` and of the B = (T - 1) * dilation rows before it, by taps fp32 [T, W]."""
    rows, width = x.shape
    for each in (x, tail, pending, taps):
        assert each.is_contiguous()
        assert each.shape[1] == width
    assert tail.shape[0] == (taps.shape[0] - 1) * dilation
    block = min(_COLUMNS, triton.next_power_of_2(width))
    _convolve[(triton.cdiv(width, block), rows)](
        x, tail, pending, taps, B=tail.shape[0], T=taps.shape[0], DILATION=dilation, W=width, BLOCK=block, num_warps=2,
        **early.options(),
    )  # fmt: skip


@triton.jit
def _row(tail, pending, at, w, inside, B: tl.constexpr, W: tl.constexpr):
    """Columns w of row `at` of the tail and, behind it, of `pending`."""
    old = tl.load(tail + at * W + w, mask=inside & (at < B), other=0.0)
    new = tl.load(pending + (at - B) * W + w, mask=inside & (at >= B), other=0.0)
    return tl.where(at < B, old, new)


@triton.jit
def _settle(tail, pending, accepted, B: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    early.behind(EARLY)
    w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = w < W
    moved = tl.load(accepted)
    rows = ()
    for b in tl.static_range(B):
        rows = rows + (_row(tail, pending, b + moved, w, inside, B, W),)  # type: ignore[assignment]
    tl.debug_barrier()  # another thread may write what this one has read
    for b in tl.static_range(B):
        tl.store(tail + b * W + w, rows[b], mask=inside)


@triton.jit
def _gate(
    x, key_value, norm_key, norm_query, norm_conv, pending, eps, least, scale, S: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    stream, row = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, HP)
    inside = h < H
    n, at = stream * H + h, (row * S + stream) * H + h
    key = tl.load(key_value + row * ((S + 1) * H) + n, mask=inside, other=0.0)
    value = tl.load(key_value + row * ((S + 1) * H) + S * H + h, mask=inside, other=0.0)
    old = tl.load(x + at, mask=inside, other=0.0)
    key *= tl.rsqrt(tl.sum(key * key, axis=0) / H + eps) * tl.load(norm_key + n, mask=inside, other=0.0)
    query = old * tl.rsqrt(tl.sum(old * old, axis=0) / H + eps) * tl.load(norm_query + n, mask=inside, other=0.0)
    score = tl.sum(key * query, axis=0) * scale
    size = tl.sqrt(tl.maximum(tl.abs(score), least))
    score = tl.where(score > 0, size, tl.where(score < 0, -size, 0.0))
    gated = value / (1.0 + tl.exp(-score))
    tl.store(x + at, old + gated, mask=inside)
    gated *= tl.rsqrt(tl.sum(gated * gated, axis=0) / H + eps) * tl.load(norm_conv + n, mask=inside, other=0.0)
    tl.store(pending + at, gated, mask=inside)


@triton.jit
def _convolve(
    x, tail, pending, taps, B: tl.constexpr, T: tl.constexpr, DILATION: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    w, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = w < W
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(T):
        value = _row(tail, pending, row + t * DILATION, w, inside, B, W)
        total += value * tl.load(taps + t * W + w, mask=inside, other=0.0)
    old = tl.load(x + row * W + w, mask=inside, other=0.0)
    tl.store(x + row * W + w, old + total / (1.0 + tl.exp(-total)), mask=inside)
