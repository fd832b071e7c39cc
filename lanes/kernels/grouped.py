"""Routed experts of many rows, grouped by expert: int8 tensor cores, with the integers and order of the decode kernels.

    ask(ids) ─▶ gate_up ─▶ h, by place ─▶ quantise ─▶ down ─▶ y, by place ─▶ add to the rows, ascending expert id

A *place* is a pair's position once pairs are sorted by (expert, row); a batch is a range of experts, so a range of
places, and batches go in ascending order. Each program takes up to BLOCK_ROWS places of one expert and a tile of its
weight rows, and reads the record where `addresses` says it lies. A group's dot is one tensor-core product of int8 with
an int32 sum, exact; everything after it is docs/expert-arithmetic.md. So every bit is that of lanes.kernels.experts,
whatever the chunk, the batch or the tile.

Not here: which experts are where, in which order they arrive (lanes.experts.ring). Invariant: what a place gets depends
on its own row and record only; a row's sum grows by its experts in ascending id.

Letters: R rows, K experts per row, P = R * K pairs, B places of a batch, H hidden, I intermediate, G group, M rows and
N weight rows of a tile, C = 8 chains.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import experts, places
from lanes.kernels.arithmetic import CHAINS, fma, gate
from lanes.kernels.experts import QuantisedRows
from lanes.kernels.places import Asked, Batch, Groups
from shared_experts.layout import PART_ALIGNMENT_BYTES, RecordLayout

BLOCK_ROWS, BLOCK_WEIGHTS, WARPS = 64, 64, 8
ADD_COLUMNS = 512
MOST_GRID = 65_535  # of a grid's second dimension
ALIGNED = tl.constexpr(PART_ALIGNMENT_BYTES)


def ask(ids: torch.Tensor, experts_of_layer: int, begins: torch.Tensor | None = None) -> Asked:
    """Begins to sort the pairs of ids int [R, K] into this module's tiles (lanes.kernels.places)."""
    return places.ask(ids, experts_of_layer, BLOCK_ROWS, begins)


def run(
    layout: RecordLayout, addresses: torch.Tensor, groups: Groups, work: Batch, x: QuantisedRows,
    weights: torch.Tensor, h: torch.Tensor, quantised: QuantisedRows, y: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Adds a batch's experts to out fp32 [R, H], which holds the sum of all earlier batches (zeros before the first).

    addresses int64 [E]; x the quantised rows [R, H]; weights fp32 [R, K]. h fp32 [B, I], quantised [B, I] and
    y fp32 [B, H] are scratch of at least the batch's places.
    """
    if not work.places:
        return
    tiles, first_tile = work.end_tile - work.first_tile, work.first_tile
    hidden, inner, bits = layout.hidden, layout.intermediate, layout.format.bits
    assert layout.format.group, "f32 records have no GPU kernel"
    assert work.places <= len(h), (work.places, len(h))
    assert max(work.places, len(out)) * hidden < 1 << 31, "offsets in a tensor are of 32 bits"
    chosen = weights.shape[1]
    shape = {"G": layout.format.group, "BITS": bits, "M": groups.tile_rows, "N": BLOCK_WEIGHTS}
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    _gate_up[(tiles, triton.cdiv(inner, BLOCK_WEIGHTS))](
        groups.tiles, first_tile, addresses, groups.pair, x.q, x.scale, x.correction, h, work.first_place,
        CODES=layout.gate_up_codes, SCALES=layout.gate_up_scales, H=hidden, I=inner, K=chosen, **shape, **options,
    )  # fmt: skip
    for start in range(0, work.places, MOST_GRID):
        part = slice(start, min(start + MOST_GRID, work.places))
        rows = QuantisedRows(quantised.q[part], quantised.scale[part], quantised.correction[part])
        experts.quantise_rows(h[part], rows, layout.format.group)
    _down[(tiles, triton.cdiv(hidden, BLOCK_WEIGHTS))](
        groups.tiles, first_tile, addresses, quantised.q, quantised.scale, quantised.correction, y, work.first_place,
        CODES=layout.down_codes, SCALES=layout.down_scales, H=hidden, I=inner, **shape, **options,
    )  # fmt: skip
    _add[(len(out), triton.cdiv(hidden, ADD_COLUMNS))](
        groups.place, weights, y, out, work.first_place, work.end_place, H=hidden, K=chosen, COLUMNS=ADD_COLUMNS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _tile(tiles, first_tile, addresses, CODES: tl.constexpr, SCALES: tl.constexpr, M: tl.constexpr):
    """(codes, scales, places [M], which of them are there) of this program's tile."""
    at = (first_tile + tl.program_id(0)) * 3
    base = tl.load(addresses + tl.load(tiles + at))
    codes = tl.multiple_of((base + CODES).to(tl.pointer_type(tl.uint8)), ALIGNED)
    scales = tl.multiple_of((base + SCALES).to(tl.pointer_type(tl.float16)), ALIGNED)
    m = tl.arange(0, M)
    return codes, scales, tl.load(tiles + at + 1) + m, m < tl.load(tiles + at + 2)


@triton.jit
def _chain(
    first, codes, scales, n, n_in, q, scale, correction, row, m_in, GROUPS: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One chain [M, N] of rows `row` [M] and weight rows n [N]: groups first, first + 8, ..."""
    BYTES: tl.constexpr = G * BITS // 8
    SPLIT: tl.constexpr = BITS == 4 and G == 64  # tensor cores take 32 bytes of int8 or more
    WIDE: tl.constexpr = G // 2 if SPLIT else G
    k = tl.arange(0, WIDE)
    at_code = codes + n[None, :] * (GROUPS * BYTES) + (k % BYTES)[:, None]
    at_q = q + row[:, None] * (GROUPS * G) + k[None, :]
    total = tl.zeros((row.shape[0], n.shape[0]), tl.float32)
    for g in range(first, GROUPS, CHAINS):
        c = tl.load(at_code + g * BYTES, mask=n_in[None, :], other=0)  # [WIDE, N]
        x = tl.load(at_q + g * G, mask=m_in[:, None], other=0)  # [M, WIDE]
        if SPLIT:  # a byte holds elements k and k + 32
            high = tl.load(at_q + g * G + WIDE, mask=m_in[:, None], other=0)
            d = tl.dot(x, (c & 15).to(tl.int8, bitcast=True), out_dtype=tl.int32)
            d = tl.dot(high, (c >> 4).to(tl.int8, bitcast=True), d, out_dtype=tl.int32)
        else:
            if BITS == 4:  # 16 bytes, each of them twice
                c = (c >> (4 * (k // BYTES))[:, None].to(tl.uint8)) & 15
            d = tl.dot(x, c.to(tl.int8, bitcast=True), out_dtype=tl.int32)
        at_group = row * GROUPS + g
        if BITS == 4:
            d -= tl.load(correction + at_group, mask=m_in, other=0)[:, None]
        s = tl.load(scale + at_group, mask=m_in, other=0.0)
        w = tl.load(scales + n * GROUPS + g, mask=n_in, other=0.0).to(tl.float32)
        total = fma(d.to(tl.float32), w[None, :] * s[:, None], total)
    return total


@triton.jit
def _dots(
    codes, scales, n, n_in, q, scale, correction, row, m_in, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """[M, N]. Chains 0 4 2 6 1 5 3 7, so that the tree adds them as they come: three sums wait, not eight."""
    one = tl.zeros((row.shape[0], n.shape[0]), tl.float32)
    two, four, u = one, one, one
    for j in range(CHAINS):
        first = ((j & 1) << 2) | (j & 2) | (j >> 2)
        chain = _chain(first, codes, scales, n, n_in, q, scale, correction, row, m_in, GROUPS, G, BITS)
        t = one + chain  # of two chains where j is odd
        u = two + t  # of four where j is 3 or 7
        one = tl.where((j & 1) == 0, chain, one)
        two = tl.where((j & 3) == 1, t, two)
        four = tl.where(j == 3, u, four)
    return four + u


@triton.jit(do_not_specialize=["first_tile", "first_place"])
def _gate_up(
    tiles, first_tile, addresses, pairs, q, scale, correction, h, first_place, CODES: tl.constexpr,
    SCALES: tl.constexpr, H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    codes, scales, place, m_in = _tile(tiles, first_tile, addresses, CODES, SCALES, M)
    row = tl.load(pairs + place, mask=m_in, other=0) // K
    n = tl.program_id(1) * N + tl.arange(0, N)
    n_in = n < I
    g = _dots(codes, scales, n, n_in, q, scale, correction, row, m_in, H // G, G, BITS)
    u = _dots(codes, scales, n + I, n_in, q, scale, correction, row, m_in, H // G, G, BITS)
    at = h + (place - first_place)[:, None] * I + n[None, :]
    tl.store(at, gate(g, u), mask=m_in[:, None] & n_in[None, :])


@triton.jit(do_not_specialize=["first_tile", "first_place"])
def _down(
    tiles, first_tile, addresses, q, scale, correction, y, first_place, CODES: tl.constexpr, SCALES: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    codes, scales, place, m_in = _tile(tiles, first_tile, addresses, CODES, SCALES, M)
    row = place - first_place
    n = tl.program_id(1) * N + tl.arange(0, N)
    n_in = n < H
    d = _dots(codes, scales, n, n_in, q, scale, correction, row, m_in, I // G, G, BITS)
    tl.store(y + row[:, None] * H + n[None, :], d, mask=m_in[:, None] & n_in[None, :])


@triton.jit(do_not_specialize=["first_place", "end_place"])
def _add(places, weights, y, out, first_place, end_place, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < H
    total = tl.load(out + r * H + column, mask=inside, other=0.0)
    for k in tl.static_range(K):
        place = tl.load(places + r * K + k)
        if (place >= first_place) & (place < end_place):
            value = tl.load(y + (place - first_place).to(tl.int64) * H + column, mask=inside, other=0.0)
            weight = tl.zeros((COLUMNS,), tl.float32) + tl.load(weights + r * K + k)
            total = fma(weight, value, total)
    tl.store(out + r * H + column, total, mask=inside)
