"""One decode window of a Gated DeltaNet layer in one launch, for few rows: the three of lanes.kernels.deltanet.

A program has a value head's whole state in registers. Before the launch in front has ended it loads the state, brings
the accepted rows of the window before into it, and loads what the convolution looks back to: none of that is of a
launch of this window. Behind it only the window's own rows remain. Key and query meet the state in one pass,
o = g S^T q + (k . q) beta (v - g S^T k), so that the state itself is moved on only where another row follows.

With three and four rows the three launches, of four times as many programs, are faster. State, tail and what a replay
needs are the same, so windows of both kinds follow each other; of kept rows q is not written: no replay reads it.

Heads whose keys and values have two sizes are not for it (`serves`): there the three launches do every window.

Letters: R rows, T taps, N value heads, A key heads, K key size, V value size (the same), C channels (2AK + NV).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.deltanet import DeltaRows, DeltaShape
from lanes.models.qwen4_exp.deltanet import L2_EPS


def serves(shape: DeltaShape) -> bool:
    """Whether a layer has sizes that the one launch knows."""
    return shape.key_dim == shape.value_dim


def step(
    shape: DeltaShape, projected: torch.Tensor, ba: torch.Tensor, taps: torch.Tensor, rate: torch.Tensor,
    shift: torch.Tensor, norm: torch.Tensor, eps: float, tail: torch.Tensor, accepted: torch.Tensor, raw: torch.Tensor,
    pending: DeltaRows, state: torch.Tensor, readers: torch.Tensor, result: torch.Tensor, *, silu: bool,
) -> None:  # fmt: skip
    """The window's rows from projected fp32 [R, C + N * V] (qkv, then z; rows at any stride) and ba fp32 [R, 2N] to
    result [R, N * V] of any float type, gated and normed by norm [V].

    Everything else is as `lanes.kernels.deltanet` has it. readers int32 [A] is zero before and afterwards: the value
    heads of a key head count there who has read its rows, the last one moves them on.
    """
    assert serves(shape), "a head's vectors lie side by side"
    a, n, d = shape.key_heads, shape.value_heads, shape.key_dim
    _step[(n,)](
        projected, projected.stride(0), ba, taps, rate, shift, norm, eps, tail, accepted, raw, pending.mixed,
        pending.decay, pending.beta, state, readers, result, R=result.shape[0], BEFORE=raw.shape[0], TAPS=shape.taps,
        A=a, N=n, K=d, V=shape.value_dim, C=shape.channels, L2=L2_EPS, SILU=silu, num_warps=8, **early.options(),
    )  # fmt: skip


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _step(
    projected, stride, ba, taps, rate, shift, norm, eps, tail, accepted, raw, mixed, decay, beta, state, readers,
    result, R: tl.constexpr, BEFORE: tl.constexpr, TAPS: tl.constexpr, A: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, L2: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.open_next(EARLY)
    head = tl.program_id(0)
    key = head // (N // A)
    i = tl.arange(0, K)
    place = state + head * (K * V) + i[:, None] * V + tl.arange(0, V)[None, :]
    s = tl.load(place)  # [K, V]
    count = tl.load(accepted)
    # A head's four vectors side by side, [K, 2, 2]: q, k, v, z. Of the last one nothing is kept.
    part = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    first = tl.where(part < 2, part * (A * K) + key * K, 2 * A * K + head * V) + tl.where(part == 3, N * V, 0)
    at = first[None, :, :] + i[:, None, None]
    kept = (part < 3)[None, :, :] & (at >= 0)
    rows, tap = (), ()
    for t in tl.static_range(TAPS):
        tap = tap + (tl.load(taps + t * C + at, mask=kept, other=0.0),)
    # All that may be needed is on its way before the number that says what is.
    history = ()
    for t in tl.static_range(TAPS - 1):
        history = history + (tl.load(tail + t * C + at, mask=kept, other=0.0),)
    for r in tl.static_range(BEFORE):
        history = history + (tl.load(raw + r * C + at, mask=kept, other=0.0),)
    pair = A * K + key * K + tl.arange(0, 2) * (A * K - key * K + head * V)  # k and v
    before, fade, strength = (), (), ()
    for r in tl.static_range(BEFORE):
        before = before + (tl.load(mixed + r * C + pair[None, :] + i[:, None]),)
        fade, strength = fade + (tl.load(decay + r * N + head),), strength + (tl.load(beta + r * N + head),)
    weight, head_rate, head_shift = tl.load(norm + tl.arange(0, V)), tl.load(rate + head), tl.load(shift + head)
    for t in tl.static_range(TAPS - 1):
        row = history[t]
        for r in tl.static_range(1, BEFORE + 1):
            row = tl.where(count == r, history[t + r], row)
        rows = rows + (row,)
    for r in tl.static_range(BEFORE):
        if r < count:
            k, v = tl.split(before[r])
            s *= fade[r]
            wrong = v - tl.sum(s * k[:, None], axis=0)
            s += k[:, None] * (strength[r] * wrong)[None, :]
    tl.debug_barrier()
    last = tl.atomic_add(readers + key, 1) == N // A - 1
    early.behind(EARLY)
    for r in tl.static_range(R):
        rows = rows + (tl.load(projected + r * stride + at),)
    tl.store(place, s)
    kept &= (part == 2)[None, :, :] | last
    for r in tl.static_range(R):
        b = tl.load(ba + r * 2 * N + head)
        a = tl.load(ba + r * 2 * N + N + head) + head_shift
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        fades, writes = tl.exp(head_rate * softplus), 1.0 / (1.0 + tl.exp(-b))
        total = rows[r] * tap[0]
        for t in tl.static_range(1, TAPS):
            total += rows[r + t] * tap[t]
        total = total / (1.0 + tl.exp(-total))
        length = tl.rsqrt(tl.sum(total * total, axis=0) + L2)
        total *= tl.where(part == 0, length * K**-0.5, tl.where(part == 1, length, 1.0))[None, :, :]
        total = tl.where((part == 3)[None, :, :], rows[TAPS - 1 + r], total)
        tl.store(mixed + r * C + at, total, mask=kept)
        tl.store(decay + r * N + head, fades)
        tl.store(beta + r * N + head, writes)
        even, odd = tl.split(total)
        q, v = tl.split(even)
        k, z = tl.split(odd)
        from_k, from_q = tl.reduce((s * k[:, None], s * q[:, None]), 0, _add)
        wrong = writes * (v - fades * from_k)
        o = fades * from_q + tl.sum(k * q, axis=0) * wrong
        if r + 1 < R:
            s = fades * s + k[:, None] * wrong[None, :]
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / V + eps)
        o *= weight * (z if SILU else 1.0) / (1.0 + tl.exp(-z))
        tl.store(result + (r * N + head) * V + tl.arange(0, V), o)
    for t in tl.static_range(TAPS - 1):
        tl.store(tail + t * C + at, rows[t], mask=kept)
    for r in tl.static_range(R):
        tl.store(raw + r * C + at, rows[TAPS - 1 + r], mask=kept)
    if last:
        tl.store(readers + key, 0)
