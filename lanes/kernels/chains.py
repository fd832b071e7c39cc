"""A tile of row dots on int8 tensor cores: groups in the order of their chains, chains in the order of the tree.

Weights are the first operand and pass through registers, where nibbles become signed bytes four at a time; activations
are the second and wait in shared memory. A group's dot is exact in int32; what follows is docs/expert-arithmetic.md.
Chains come in the order 0 4 2 6 1 5 3 7, in which the tree adds them, so that three sums wait and not eight. Scales are
read a group before they are used, or a warp would wait for each.

Two forms of one result: `long_rows` for any width, a chain a round; `short_rows` where a row is few groups and its
activations stay in shared memory while weight rows pass by.

Not here: where anything lies (grouped). Invariant: the bits of lanes.kernels.experts.

Letters: N weight rows, M places of a tile, G group, GROUPS groups of a row, C = 8 chains.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lanes.kernels.arithmetic import CHAINS, INTERPRETED, fma

# Of four bytes with a nibble n in the low half each: n | 128, less 8, and the top bit turned: n - 8 as a signed byte.
_LOW = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 t, $1, 0x0F0F0F0F, 0x80808080, 0xEA;
    sub.u32 t, t, 0x08080808;
    xor.b32 $0, t, 0x80808080;
}""")
_HIGH = tl.constexpr("""{
    .reg .b32 t;
    shr.u32 t, $1, 4;
    lop3.b32 t, t, 0x0F0F0F0F, 0x80808080, 0xEA;
    sub.u32 t, t, 0x08080808;
    xor.b32 $0, t, 0x80808080;
}""")


@triton.constexpr_function
def _turned(j):
    """The j-th chain of the tree's order."""
    return ((j & 1) << 2) | (j & 2) | (j >> 2)


@triton.jit
def _signed(codes, HIGH: tl.constexpr):
    """A nibble of each byte, less 8, as int8."""
    if INTERPRETED:
        n = codes >> 4 if HIGH else codes & 15
        result = n.to(tl.int8) - 8
    else:
        ASM: tl.constexpr = _HIGH if HIGH else _LOW
        result = tl.inline_asm_elementwise(ASM, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)
    return result


@triton.jit
def _weights(codes, BITS: tl.constexpr):
    """Codes uint8 [N, bytes of a group] as int8 [N, G]; a byte of 4-bit codes holds elements k and k + G/2."""
    if BITS == 4:
        N: tl.constexpr = codes.shape[0]
        both = tl.join(_signed(codes, False), _signed(codes, True))
        result = tl.reshape(tl.permute(both, (0, 2, 1)), (N, 2 * codes.shape[1]))
    else:
        result = codes.to(tl.int8, bitcast=True)
    return result


@triton.jit
def _more(total, codes, x, w, s, BITS: tl.constexpr):
    """total fp32 [N, M] and one group: codes [N, bytes], x int8 [G, M], scales of weights fp16 [N], of x fp32 [M]."""
    d = tl.dot(_weights(codes, BITS), x, out_dtype=tl.int32)
    return fma(d.to(tl.float32), w.to(tl.float32)[:, None] * s[None, :], total)


@triton.jit
def long_rows(codes, scales, n, at_x, at_s, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """[N, M]: weight rows n of the matrix with `codes` uint8 [.., GROUPS, bytes] and `scales` fp16 [.., GROUPS], by the
    tile's columns: at_x points to int8 [G, M] of group 0, G further to the next; at_s to fp32 [M], M further.
    """
    BYTES: tl.constexpr = G * BITS // 8
    STEPS: tl.constexpr = (GROUPS + 7) // 8
    RAGGED: tl.constexpr = GROUPS != STEPS * 8
    N: tl.constexpr = n.shape[0]
    M: tl.constexpr = at_s.shape[0]
    at_code = codes + n[:, None] * (GROUPS * BYTES) + tl.arange(0, BYTES)[None, :]
    at_w = scales + n * GROUPS
    one = tl.zeros((N, M), tl.float32)
    two, four = one, one
    w, s = tl.load(at_w), tl.load(at_s)
    for j in range(CHAINS):
        chain = ((j & 1) << 2) | (j & 2) | (j >> 2)
        k = (j + 1) & 7
        following = ((k & 1) << 2) | (k & 2) | (k >> 2)
        total = tl.zeros((N, M), tl.float32)
        for t in tl.static_range(STEPS):
            g = chain + CHAINS * t
            ahead = g + CHAINS if t < STEPS - 1 else following
            here = ahead < GROUPS
            if RAGGED:
                g, ahead = tl.minimum(g, GROUPS - 1), tl.minimum(ahead, GROUPS - 1)
            next_w, next_s = tl.load(at_w + ahead), tl.load(at_s + ahead * M)
            if RAGGED:  # what is not there is multiplied by zero
                next_w, next_s = tl.where(here, next_w, 0.0), tl.where(here, next_s, 0.0)
            total = _more(total, tl.load(at_code + g * BYTES), tl.load(at_x + g * G), w, s, BITS)
            w, s = next_w, next_s
        if j & 1 == 0:
            one = total
        else:
            pair = one + total
            if j & 2 == 0:
                two = pair
            else:
                four = four + (two + pair)  # at first from zero: a sum is never -0, as no chain is
    return four


@triton.jit
def columns(at_x, GROUPS: tl.constexpr, G: tl.constexpr):
    """A tile's activations, group by group: int8 [G, M] each."""
    x = ()
    for g in tl.static_range(GROUPS):
        x += (tl.load(at_x + g * G),)  # type: ignore[assignment]
    return x


@triton.jit
def short_rows(codes, scales, n, x, at_s, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """The same with x = `columns`."""
    BYTES: tl.constexpr = G * BITS // 8
    N: tl.constexpr = n.shape[0]
    M: tl.constexpr = at_s.shape[0]
    at_code = codes + n[:, None] * (GROUPS * BYTES) + tl.arange(0, BYTES)[None, :]
    at_w = scales + n * GROUPS
    for j in tl.static_range(CHAINS):
        total = tl.zeros((N, M), tl.float32)
        for g in tl.static_range(_turned(j), GROUPS, CHAINS):
            total = _more(total, tl.load(at_code + g * BYTES), x[g], tl.load(at_w + g), tl.load(at_s + g * M), BITS)
        if j % 2 == 0:
            one = total
        else:
            pair = one + total
            if j % 4 == 1:
                two = pair
            else:
                half = two + pair
                if j == 3:
                    four = half
    return four + half
