"""Expert arithmetic spelt out in numpy: the truth that every kernel is tested against, bit for bit.

It follows docs/expert-arithmetic.md sentence by sentence, takes a record as bytes and is as slow as it looks.
Not here: anything fast. Invariant: fp32 values are rounded once per operation written in that page.

Letters: H hidden, I intermediate, G group, K row length, g groups of a row, N weight rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared_experts.layout import RecordLayout

Floats = NDArray[np.float32]
CHAINS = 8


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once to fp32.

    The product is exact in fp64. The sum is rounded to odd there (towards the even neighbour is moved one step in the
    direction of what was lost), so that rounding it again to fp32 is the same as rounding the exact value.
    """
    p = a.astype(np.float64) * b.astype(np.float64)
    c64 = np.broadcast_to(c, p.shape).astype(np.float64)
    total = p + c64
    part = total - p
    lost = (p - (total - part)) + (c64 - part)
    even = total.view(np.int64) % 2 == 0
    step = np.isfinite(total) & (lost != 0) & even
    odd = np.where(step, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def quantise(x: Floats, group: int) -> tuple[NDArray[np.int32], Floats]:
    """A row [K] as integers [g, G] and scales [g]."""
    blocks = np.ascontiguousarray(x).reshape(-1, group)
    m = (blocks.view(np.int32) & 0x7FFFFFFF).max(axis=1).view(np.float32)
    usable = np.isfinite(m) & (m >= np.float32(2.0**-100))
    safe = np.where(usable, m, np.float32(1))
    scale = np.where(np.isfinite(m), np.where(usable, safe / np.float32(127), np.float32(0)), np.float32(np.nan))
    scaled = np.where(usable[:, None], blocks, np.float32(0)) * (np.float32(127) / safe)[:, None]
    return np.rint(scaled).astype(np.int32), scale.astype(np.float32)


def tree(chains: Floats) -> Floats:
    """[N, 8] chains to [N] sums."""
    t = chains[:, :4] + chains[:, 4:]
    u = t[:, :2] + t[:, 2:]
    return u[:, 0] + u[:, 1]


def dots_q4(codes: NDArray[np.uint8], scales: NDArray[np.float16], q: NDArray[np.int32], s: Floats) -> Floats:
    """Rows of codes [N, K/2] and scales [N, g] times one quantised row: [N]."""
    rows, (groups, group) = len(codes), q.shape
    packed = codes.reshape(rows, groups, group // 2)
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.int32)  # [N, g, G]
    d = (nibbles * q).sum(axis=2) - 8 * q.sum(axis=1)  # [N, g], exact
    return _chains(d, scales, s)


def dots_q8(codes: NDArray[np.int8], scales: NDArray[np.float16], q: NDArray[np.int32], s: Floats) -> Floats:
    """Rows of codes [N, K] and scales [N, g] times one quantised row: [N]."""
    d = (codes.reshape(len(codes), *q.shape).astype(np.int32) * q).sum(axis=2)  # [N, g], exact
    return _chains(d, scales, s)


def _chains(d: NDArray[np.int64], scales: NDArray[np.float16], s: Floats) -> Floats:
    """Integer dots [N, g], weight scales [N, g] and activation scales [g] to [N]."""
    chains = np.zeros((len(d), CHAINS), np.float32)
    for g in range(d.shape[1]):
        chain = chains[:, g % CHAINS]
        chains[:, g % CHAINS] = fma(d[:, g].astype(np.float32), scales[:, g].astype(np.float32) * s[g], chain)
    return tree(chains)


def dots_f32(w: Floats, x: Floats) -> Floats:
    """Rows of weights [N, K] times one row [K]: [N]."""
    chains = np.zeros((len(w), CHAINS), np.float32)
    for k in range(w.shape[1]):
        chains[:, k % CHAINS] = fma(w[:, k], x[k : k + 1], chains[:, k % CHAINS])
    return tree(chains)


def exp(x: Floats) -> Floats:
    """The exponential of the gate: clamped to [-87, 88], NaN stays NaN."""
    f = np.float32
    nan = np.isnan(x)
    x = np.clip(np.where(nan, f(0), x), f(-87), f(88))
    n = np.rint(x * f(1.44269504))
    r = fma(n, np.full_like(n, f(-0.693359375)), x)
    r = fma(n, np.full_like(n, f(2.12194440e-4)), r)
    p = np.full_like(r, f(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, np.full_like(r, f(c)))
    p = fma(p, r * r, r) + f(1)
    return np.where(nan, f(np.nan), p * np.ldexp(f(1), n.astype(np.int32)))  # exp2(127) is not exact in numpy


def gate(g: Floats, u: Floats) -> Floats:
    """(g * sigmoid(g)) * u."""
    return (g * (np.float32(1) / (np.float32(1) + exp(-g)))) * u


def expert(layout: RecordLayout, record: bytes, x: Floats) -> Floats:
    """One expert's record applied to one row [H]: fp32 [H]."""
    with np.errstate(all="ignore"):
        h, i, group = layout.hidden, layout.intermediate, layout.format.group

        def part(dtype: type, offset: int, rows: int, columns: int) -> NDArray[Any]:
            return np.frombuffer(record, dtype, rows * columns, offset).reshape(rows, columns)

        if not group:
            gate_up = dots_f32(part(np.float32, layout.gate_up_codes, 2 * i, h), x)
            return dots_f32(part(np.float32, layout.down_codes, h, i), gate(gate_up[:i], gate_up[i:]))

        def dots(codes_at: int, scales_at: int, rows: int, row: Floats) -> Floats:
            q, s = quantise(row, group)
            scales = part(np.float16, scales_at, rows, len(row) // group)
            if layout.format.bits == 8:
                return dots_q8(part(np.int8, codes_at, rows, len(row)), scales, q, s)
            return dots_q4(part(np.uint8, codes_at, rows, len(row) // 2), scales, q, s)

        gate_up = dots(layout.gate_up_codes, layout.gate_up_scales, 2 * i, x)
        return dots(layout.down_codes, layout.down_scales, h, gate(gate_up[:i], gate_up[i:]))


def combine(weights: Floats, y: Floats) -> Floats:
    """Weights [K] and rows [K, H], ascending expert id, to the layer's row [H]."""
    total = np.zeros(y.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for k in range(len(weights)):
            total = fma(weights[k : k + 1], y[k], total)
    return total
