"""Routed experts of many rows, grouped by expert: int8 tensor cores, with the integers and order of the decode kernels.

    ask(ids) ─▶ scales, by tile ─▶ gate_up ─▶ q, by place ─▶ down ─▶ y, by place ─▶ add to the rows, ascending expert id

A *place* is a pair's position once pairs are sorted by (expert, row); a batch is a range of experts, so a range of
places, and batches go in ascending order. Each program takes up to BLOCK_ROWS places of one expert and a tile of its
weight rows, and reads the record where `addresses` says it lies. A gate-up program has whole groups of the intermediate
and quantises them, so those never lie in memory as fp32. Dots are those of lanes.kernels.chains. So every bit is that
of lanes.kernels.experts, whatever the chunk, the batch or the tile.

Not here: which experts are where, in which order they arrive (lanes.experts.ring). Invariant: what a place gets depends
on its own row and record only; a row's sum grows by its experts in ascending id.

Letters: R rows, K experts per row, P = R * K pairs, B places and T tiles of a batch, H hidden, I intermediate, G group,
M places and N weight rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import places
from lanes.kernels.arithmetic import fma, gate, group_scale, quantised
from lanes.kernels.chains import columns, long_rows, short_rows
from lanes.kernels.places import Asked, Batch, Groups
from lanes.kernels.rows import QuantisedRows
from shared_experts.layout import PART_ALIGNMENT_BYTES, RecordLayout

BLOCK_ROWS = 64  # places of a tile
# Of gate-up warps and stages, of down weight rows of a tile, tiles of a program, warps and stages: measured on an H200
# (bench.gpu_prefill --sweep). Codes of 8 bits take two stages, or a program would have more than 99 KiB.
GATE, DOWN = (4, 3), (64, 8, 4, 2)
MOST_SHORT = 16  # groups of a row, whose activations then stay in shared memory
ADD_COLUMNS = 512
ALIGNED = tl.constexpr(PART_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Of one batch: scales of its rows by tile fp32 [T, H/G, M], the intermediate q int8 [B, I] and its scales fp32
    [T, I/G, M], y fp32 [B, H]."""

    x_scale: torch.Tensor
    q: torch.Tensor
    scale: torch.Tensor
    y: torch.Tensor

    @classmethod
    def of(cls, layout: RecordLayout, place_count: int, expert_count: int, device: torch.device | str) -> Scratch:
        """For any batch of so many places, of so many experts at most."""
        tiles = place_count // BLOCK_ROWS + min(expert_count, place_count)
        x_groups, groups = (width // layout.format.group for width in (layout.hidden, layout.intermediate))
        return cls(
            torch.empty((tiles, x_groups, BLOCK_ROWS), device=device),
            torch.empty((place_count, layout.intermediate), dtype=torch.int8, device=device),
            torch.empty((tiles, groups, BLOCK_ROWS), device=device),
            torch.empty((place_count, layout.hidden), device=device),
        )  # fmt: skip


def ask(ids: torch.Tensor, experts_of_layer: int, begins: torch.Tensor | None = None) -> Asked:
    """Begins to sort the pairs of ids int [R, K] into this module's tiles (lanes.kernels.places)."""
    return places.ask(ids, experts_of_layer, BLOCK_ROWS, begins)


def run(
    layout: RecordLayout, addresses: torch.Tensor, groups: Groups, work: Batch, x: QuantisedRows,
    weights: torch.Tensor, scratch: Scratch, out: torch.Tensor,
) -> None:  # fmt: skip
    """Adds a batch's experts to out fp32 [R, H], which holds the sum of all earlier batches (zeros before the first).

    addresses int64 [E]; x the quantised rows [R, H]; weights fp32 [R, K].
    """
    if not work.places:
        return
    tiles, first_tile, rows = work.end_tile - work.first_tile, work.first_tile, groups.tile_rows
    hidden, inner, group = layout.hidden, layout.intermediate, layout.format.group
    assert group, "f32 records have no GPU kernel"
    assert work.places <= len(scratch.y), (work.places, len(scratch.y))
    assert tiles <= len(scratch.scale), (tiles, len(scratch.scale))
    assert max(work.places, len(out)) * hidden < 1 << 31, "offsets in a tensor are of 32 bits"
    chosen = weights.shape[1]
    _scales[(tiles,)](
        groups.tiles, first_tile, groups.pair, x.scale, scratch.x_scale, GROUPS=hidden // group,
        WIDE=triton.next_power_of_2(hidden // group), K=chosen, M=rows, num_warps=4,
    )  # fmt: skip
    shape = {"H": hidden, "I": inner, "G": group, "BITS": layout.format.bits, "M": rows}
    tile = _tile_of(inner, 64)
    _gate_up[(tiles, inner // tile)](
        groups.tiles, first_tile, addresses, groups.pair, x.q, scratch.x_scale, scratch.q, scratch.scale,
        work.first_place, CODES=layout.gate_up_codes, SCALES=layout.gate_up_scales, K=chosen, N=tile, **shape,
        num_warps=GATE[0], num_stages=GATE[1] if layout.format.bits == 4 else 2, enable_fp_fusion=False,
    )  # fmt: skip
    most, tiles_of_program, warps, stages = DOWN
    tile = _tile_of(hidden, most)
    many = next(n for n in range(tiles_of_program, 0, -1) if hidden // tile % n == 0)
    _down[(tiles, hidden // (tile * many))](
        groups.tiles, first_tile, addresses, scratch.q, scratch.scale, scratch.y, work.first_place,
        CODES=layout.down_codes, SCALES=layout.down_scales, N=tile, TILES=many, SHORT=inner // group <= MOST_SHORT,
        **shape, num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
    _add[(len(out), triton.cdiv(hidden, ADD_COLUMNS))](
        groups.place, weights, scratch.y, out, work.first_place, work.end_place, H=hidden, K=chosen,
        COLUMNS=ADD_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _tile_of(rows: int, most: int) -> int:
    """Weight rows of a tile: sizes are multiples of 32."""
    while rows % most:
        most //= 2
    return most


@triton.jit
def _tile(tiles, first_tile, addresses, CODES: tl.constexpr, SCALES: tl.constexpr, M: tl.constexpr):
    """(codes, scales, places [M], which of them are there) of this program's tile."""
    at = (first_tile + tl.program_id(0)) * 3
    base = tl.load(addresses + tl.load(tiles + at))
    codes = tl.multiple_of((base + CODES).to(tl.pointer_type(tl.uint8)), ALIGNED)
    scales = tl.multiple_of((base + SCALES).to(tl.pointer_type(tl.float16)), ALIGNED)
    m = tl.arange(0, M)
    return codes, scales, tl.load(tiles + at + 1) + m, m < tl.load(tiles + at + 2)


@triton.jit(do_not_specialize=["first_tile"])
def _scales(
    tiles, first_tile, pairs, scale, out, GROUPS: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """out [T, GROUPS, M] of a tile's rows, so that a group's lie together; zeros where there is no row."""
    tile = tl.program_id(0)
    at = (first_tile + tile) * 3
    m, g = tl.arange(0, M), tl.arange(0, WIDE)
    m_in = m < tl.load(tiles + at + 2)
    row = tl.load(pairs + tl.load(tiles + at + 1) + m, mask=m_in, other=0) // K
    s = tl.load(scale + row[:, None] * GROUPS + g[None, :], mask=m_in[:, None] & (g < GROUPS)[None, :], other=0.0)
    tl.store(out + (tile * GROUPS + g[None, :]) * M + m[:, None], s, mask=(g < GROUPS)[None, :] & (m >= 0)[:, None])


@triton.jit(do_not_specialize=["first_tile", "first_place"])
def _gate_up(
    tiles, first_tile, addresses, pairs, q, x_scale, h, h_scale, first_place, CODES: tl.constexpr,
    SCALES: tl.constexpr, H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N of the intermediate, whole groups: gate rows, then up rows, so that a thread has both of an element."""
    GROUPS: tl.constexpr = H // G
    PARTS: tl.constexpr = N // G
    codes, scales, place, m_in = _tile(tiles, first_tile, addresses, CODES, SCALES, M)
    row = tl.load(pairs + place, mask=m_in, other=0) // K
    m = tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    at_x, at_s = q + row[None, :] * H + tl.arange(0, G)[:, None], x_scale + tl.program_id(0) * (GROUPS * M) + m
    g = long_rows(codes, scales, n, at_x, at_s, GROUPS, G, BITS)
    u = long_rows(codes, scales, n + I, at_x, at_s, GROUPS, G, BITS)
    v = tl.reshape(gate(g, u), (PARTS, G, M))
    s, reciprocal, usable = group_scale(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))  # [PARTS, M]
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    tl.store(h_scale + (tl.program_id(0) * (I // G) + part[:, None]) * M + m[None, :], s)
    at = (place - first_place)[None, None, :] * I + part[:, None, None] * G + tl.arange(0, G)[None, :, None]
    tl.store(h + at, quantised(v, reciprocal[:, None, :], usable[:, None, :]).to(tl.int8), mask=m_in[None, None, :])


@triton.jit(do_not_specialize=["first_tile", "first_place"])
def _down(
    tiles, first_tile, addresses, q, scale, y, first_place, CODES: tl.constexpr, SCALES: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TILES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """TILES tiles of N weight rows, one after another."""
    GROUPS: tl.constexpr = I // G
    codes, scales, place, m_in = _tile(tiles, first_tile, addresses, CODES, SCALES, M)
    row = tl.where(m_in, place - first_place, 0)
    at_x = q + row[None, :] * I + tl.arange(0, G)[:, None]
    at_s = scale + tl.program_id(0) * (GROUPS * M) + tl.arange(0, M)
    if SHORT:
        x = columns(at_x, GROUPS, G)
    for t in range(TILES):
        n = (tl.program_id(1) * TILES + t) * N + tl.arange(0, N)
        if SHORT:
            d = short_rows(codes, scales, n, x, at_s, GROUPS, G, BITS)
        else:
            d = long_rows(codes, scales, n, at_x, at_s, GROUPS, G, BITS)
        tl.store(y + row[None, :] * H + n[:, None], d, mask=m_in[None, :])


@triton.jit(do_not_specialize=["first_place", "end_place"])
def _add(places, weights, y, out, first_place, end_place, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < H
    mine = 0
    for k in tl.static_range(K):
        place = tl.load(places + r * K + k)
        mine += ((place >= first_place) & (place < end_place)).to(tl.int32)
    if mine > 0:  # of most rows a batch has nothing
        total = tl.load(out + r * H + column, mask=inside, other=0.0)
        for k in tl.static_range(K):
            place = tl.load(places + r * K + k)
            if (place >= first_place) & (place < end_place):
                value = tl.load(y + (place - first_place).to(tl.int64) * H + column, mask=inside, other=0.0)
                weight = tl.zeros((COLUMNS,), tl.float32) + tl.load(weights + r * K + k)
                total = fma(weight, value, total)
        tl.store(out + r * H + column, total, mask=inside)
