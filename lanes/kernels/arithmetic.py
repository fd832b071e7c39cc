"""docs/expert-arithmetic.md inside Triton kernels: fused multiply-add, rounding, integer dots, chains, the exponential.

Two spellings of the same numbers where the interpreter cannot run the device's: fma (the interpreter rounds twice) and
dp4a (inline assembly). Not here: memory. Invariant: on either side every function gives the bits of that page, so a
kernel must be launched with enable_fp_fusion=False: a multiply and an add fuse only where `fma` is written.

Letters: C chains.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

CHAINS = tl.constexpr(8)
_TINY_BITS = tl.constexpr((127 - 100) << 23)  # 2^-100
_INF_BITS = tl.constexpr(0x7F800000)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to nearest even, below 2^22
_LOG2E, _LN2_HIGH, _LN2_LOW = tl.constexpr(1.44269504), tl.constexpr(-0.693359375), tl.constexpr(2.12194440e-4)
_E0, _E1, _E2 = tl.constexpr(1.9875691500e-4), tl.constexpr(1.3981999507e-3), tl.constexpr(8.3334519073e-3)
_E3, _E4, _E5 = tl.constexpr(4.1665795894e-2), tl.constexpr(1.6666665459e-1), tl.constexpr(5.0000001201e-1)


@triton.jit
def fma(a, b, c):
    """a * b + c rounded once to fp32."""
    if INTERPRETED:
        # As lanes.experts.reference.fma: the exact product in fp64, the sum rounded to odd there, then to fp32.
        p = a.to(tl.float64) * b.to(tl.float64)
        c64 = c.to(tl.float64)
        total = p + c64
        part = total - p
        lost = (p - (total - part)) + (c64 - part)
        bits = total.to(tl.int64, bitcast=True)
        step = (tl.abs(total) < float("inf")) & (lost != 0.0) & ((bits & 1) == 0)
        outward = (lost > 0.0) == (total > 0.0)
        moved = tl.where(outward, bits + 1, bits - 1)
        result = tl.where(step, moved, bits).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        result = tl.fma(a, b, c)
    return result


@triton.jit
def rne(x):
    """Nearest integer as fp32, halves to even, for |x| < 2^22; never -0."""
    return (x + _ROUND) - _ROUND


@triton.jit
def dot4_unsigned(codes, q, total):
    """total + the dot of four unsigned bytes of `codes` with four signed ones of `q`; all int32."""
    if INTERPRETED:
        result = total
        for b in tl.static_range(4):
            result += ((codes >> (8 * b)) & 255) * ((q << (24 - 8 * b)) >> 24)
    else:
        result = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, q, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def dot4_signed(codes, q, total):
    """The same with signed bytes on both sides."""
    if INTERPRETED:
        result = total
        for b in tl.static_range(4):
            result += ((codes << (24 - 8 * b)) >> 24) * ((q << (24 - 8 * b)) >> 24)
    else:
        result = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, q, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return result


@triton.jit
def group_scale(max_bits):
    """(scale, reciprocal, usable) of groups from the bits of their greatest absolute value; q = 0 where not usable."""
    usable = (max_bits >= _TINY_BITS) & (max_bits < _INF_BITS)
    m = tl.where(usable, max_bits, 0x3F800000).to(tl.float32, bitcast=True)
    unusable = tl.where(max_bits >= _INF_BITS, float("nan"), 0.0)
    steps = tl.full(m.shape, 127.0, tl.float32)
    return tl.where(usable, tl.div_rn(m, steps), unusable), tl.div_rn(steps, m), usable


@triton.jit
def quantised(x, reciprocal, usable):
    """int32 in -127..127; x must be broadcast with the group's reciprocal."""
    return rne(tl.where(usable, x, 0.0) * reciprocal).to(tl.int32)


@triton.jit
def tree(chains):
    """[N, C] chains to [N]: ((a0+a4)+(a2+a6)) + ((a1+a5)+(a3+a7)). A sum of two is exact in either order."""
    rows: tl.constexpr = chains.shape[0]
    t = tl.sum(tl.reshape(chains, (rows, 2, 4)), axis=1)
    u = tl.sum(tl.reshape(t, (rows, 2, 2)), axis=1)
    return tl.sum(u, axis=1)


@triton.jit
def exponential(x):
    """The exponential of the gate: clamped to [-87, 88], NaN stays NaN."""
    known = x == x
    x = tl.where(known, x, 0.0)
    x = tl.where(x < -87.0, -87.0, x)
    x = tl.where(x > 88.0, 88.0, x)
    n = rne(x * _LOG2E)
    r = fma(n, tl.full(x.shape, _LN2_HIGH, tl.float32), x)
    r = fma(n, tl.full(x.shape, _LN2_LOW, tl.float32), r)
    p = fma(tl.full(x.shape, _E0, tl.float32), r, tl.full(x.shape, _E1, tl.float32))
    p = fma(p, r, tl.full(x.shape, _E2, tl.float32))
    p = fma(p, r, tl.full(x.shape, _E3, tl.float32))
    p = fma(p, r, tl.full(x.shape, _E4, tl.float32))
    p = fma(p, r, tl.full(x.shape, _E5, tl.float32))
    p = fma(p, r * r, r) + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(known, p * power, float("nan"))


@triton.jit
def gate(g, u):
    """(g * sigmoid(g)) * u."""
    one = 1.0 + exponential(-g)
    return (g * tl.div_rn(tl.full(one.shape, 1.0, tl.float32), one)) * u
