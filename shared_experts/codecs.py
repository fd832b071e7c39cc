"""How numbers are written: 16- and 8-bit floats, and the codes of experts; plain numpy, the truth of native code.

Not here: speed (`quantiser`) or where bytes lie (`layout`). Invariant: every operation is one IEEE fp32 operation in
the order written here, so that another implementation can be equal bit for bit.

The 4-bit code of a group of G values x (G = 64 or 32): `value = (code - 8) * scale`, scale in fp16. Candidates are the
zero scale first, then, for sign + and then -, the sixteen clips k = 0..15:

    s_k = fp16( sign * (max|x| * ((42 + 2k) / 512)) )        skipped where zero
    q   = clamp(rne(x * (1 / s_k)), -8, 7)                   1 / s_k correctly rounded
    e   = x - q * s_k;  error = sum of e * e                 sixteen chains j = 0..15 over elements j, j + 16, ...,
                                                             then the halving tree 16 -> 8 -> 4 -> 2 -> 1

The candidate with the least error wins, the earlier one where two are equal. Scales are rounded before codes are
chosen, so the codes make up for the rounding. Both signs, because -8 reaches further than 7.

The 8-bit code of a group of 64 values x: `value = code * scale`, scale in fp16:

    s = fp16(max|x| / 127); where s * 127.5 < max|x|, the next fp16 above    the product is exact
    q = clamp(rne(x / s), -127, 127), and 0 where s is zero                  the quotient is correctly rounded

So every value is at most half a step off, down to the smallest fp16 scale, and s is zero only where all of x is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]
I8Array = npt.NDArray[np.int8]
U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]
CodesArray = U8Array | I8Array
F16Array = npt.NDArray[np.float16]

CLIPS = (np.arange(16, dtype=np.float32) * np.float32(2) + np.float32(42)) / np.float32(512)
LARGEST_WEIGHT = 65504.0  # the largest fp16; a group's scale is at most about 0.14 of its largest value

BF16_MAX = np.uint32(0x7F7F8000)  # the least fp32 bits that round to infinity


def f32_from_bf16(bits: npt.NDArray[np.uint16]) -> F32Array:
    """The exact fp32 value of bf16 bits."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def bf16_from_f32(values: F32Array) -> U16Array:
    """Rounds to nearest even; values must be finite. Raises ValueError where bf16 would overflow."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if ((bits & np.uint32(0x7FFFFFFF)) >= BF16_MAX).any():
        raise ValueError("a value is too large for bf16")
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _e4m3_values() -> F32Array:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    values[[0x7F, 0xFF]] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


E4M3 = _e4m3_values()  # the fp32 value of every code; NaN at 0x7F and 0xFF
LARGEST_E4M3 = 448.0


def f32_from_e4m3(codes: U8Array, scales: F32Array, block: tuple[int, int]) -> F32Array:
    """Codes [R, C] times the scale of their block, one fp32 product each; NaN where a code is none.

    `scales` is [ceil(R / block rows), ceil(C / block columns)].
    """
    rows, columns = codes.shape
    wide = np.repeat(np.repeat(scales, block[0], axis=0)[:rows], block[1], axis=1)[:, :columns]
    return (E4M3[codes] * wide).astype(np.float32)


def pack_nibbles(codes: U8Array, group: int) -> U8Array:
    """Codes 0..15 [..., K] to bytes [..., K/2]: in each group, byte j holds element j low and j + group/2 high."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, group // 2)
    packed = halves[..., 0, :] | (halves[..., 1, :] << np.uint8(4))
    return packed.reshape(*codes.shape[:-1], -1)


def unpack_nibbles(packed: U8Array, group: int) -> U8Array:
    """The inverse of `pack_nibbles`."""
    halves = packed.reshape(*packed.shape[:-1], -1, 1, group // 2)
    codes = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-2)
    return codes.reshape(*packed.shape[:-1], -1)


def quantise_q4(weights: F32Array, group: int) -> tuple[U8Array, F16Array]:
    """fp32 [N, K] to (packed codes [N, K/2], fp16 scales [N, K/group]).

    Raises ValueError for sizes that do not fit and for weights that are not finite or beyond LARGEST_WEIGHT.
    """
    rows, columns = weights.shape
    if group not in (32, 64) or columns % group:
        raise ValueError(f"{columns} columns are not a multiple of a group of {group}")
    if not (np.abs(weights) <= LARGEST_WEIGHT).all():
        raise ValueError(f"a weight is not finite or beyond {LARGEST_WEIGHT:.0f}")
    x = np.ascontiguousarray(weights, np.float32).reshape(-1, group)  # [B, G]
    peak = np.abs(x).max(axis=1)
    error = _sum_of_squares(x)
    scale = np.zeros(len(x), np.float16)
    codes = np.full(x.shape, 8, np.uint8)
    for sign in (np.float32(1), np.float32(-1)):
        for clip in CLIPS:
            candidate = (sign * (peak * clip)).astype(np.float16)
            wide = candidate.astype(np.float32)[:, None]  # [B, 1]
            usable = wide[:, 0] != 0
            with np.errstate(divide="ignore", invalid="ignore"):
                q = np.clip(np.rint(x * (np.float32(1) / wide)), np.float32(-8), np.float32(7))
                new_error = _sum_of_squares(x - q * wide)
            better = usable & (new_error < error)
            error = np.where(better, new_error, error)
            scale = np.where(better, candidate, scale)
            codes[better] = (q[better] + np.float32(8)).astype(np.uint8)
    return pack_nibbles(codes.reshape(rows, columns), group), scale.reshape(rows, columns // group)


def dequantise_q4(packed: U8Array, scales: F16Array, group: int) -> F32Array:
    """The fp32 [N, K] that (packed codes [N, K/2], scales [N, K/group]) stand for."""
    codes = unpack_nibbles(packed, group).astype(np.float32) - np.float32(8)
    wide = np.repeat(scales.astype(np.float32), group, axis=-1)
    return (codes * wide).astype(np.float32)


def quantise_q8(weights: F32Array, group: int = 64) -> tuple[I8Array, F16Array]:
    """fp32 [N, K] to (codes [N, K], fp16 scales [N, K/group]); raises ValueError as `quantise_q4` does."""
    rows, columns = weights.shape
    if group != 64 or columns % group:
        raise ValueError(f"{columns} columns are not a multiple of a group of {group}; q8 has groups of 64")
    if not (np.abs(weights) <= LARGEST_WEIGHT).all():
        raise ValueError(f"a weight is not finite or beyond {LARGEST_WEIGHT:.0f}")
    x = np.ascontiguousarray(weights, np.float32).reshape(-1, group)  # [B, G]
    peak = np.abs(x).max(axis=1)
    scale = (peak / np.float32(127)).astype(np.float16)
    short = scale.astype(np.float32) * np.float32(127.5) < peak
    scale.view(np.uint16)[short] += np.uint16(1)
    wide = np.where(scale == 0, np.float32(1), scale.astype(np.float32))[:, None]
    codes = np.clip(np.rint(x / wide), np.float32(-127), np.float32(127)).astype(np.int8)
    return codes.reshape(rows, columns), scale.reshape(rows, columns // group)


def dequantise_q8(codes: I8Array, scales: F16Array, group: int = 64) -> F32Array:
    """The fp32 [N, K] that (codes [N, K], scales [N, K/group]) stand for; every product is exact."""
    return (codes.astype(np.float32) * np.repeat(scales.astype(np.float32), group, axis=-1)).astype(np.float32)


def _sum_of_squares(e: F32Array) -> F32Array:
    squares = (e * e).reshape(len(e), -1, 16)  # [B, G/16, 16]
    total = squares[:, 0]
    for step in range(1, squares.shape[1]):
        total = total + squares[:, step]
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    result: F32Array = total[:, 0]
    return result
