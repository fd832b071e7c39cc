"""Routed experts of a decode window, in two launches: gate-up with the gate, then down with the intermediate quantised.

Records are read where `addresses` says they lie: a slot in VRAM or the expert's place in the pinned region. A miss is
only a slower pointer. A job is one distinct expert of the window, so its bytes cross the link once however many rows
chose it. Arithmetic, and so every bit, is that of docs/expert-arithmetic.md; lanes.kernels.naive spells it out.

Not here: which experts (route), the weighted sum (combine). Invariant: y[p] of every pair p that a job names is
written, nothing else; a job of -1 does nothing.

Letters: R rows (1..4), K experts per row, P = R * K pairs (pair r * K + k is row r's k-th expert), J = P jobs at most,
H hidden, I intermediate, G group, C = 8 chains, M rows of one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import doorbell, early
from lanes.kernels.ahead import LINES, Ahead, send
from lanes.kernels.arithmetic import CHAINS, dot4_signed, dot4_unsigned, fma, gate, group_scale, quantised, tree
from shared_experts.layout import PART_ALIGNMENT_BYTES, RecordLayout

MOST_ROWS = 4
# (Weight rows, warps) of a program, by how many rows a window has: measured on an H200 (bench.gpu_kernels sweeps them).
# 128 threads make a step of q4g64 a 16-byte load per thread and matrix for every eight weight rows. Small scale tensors
# (fewer than the threads) are loaded where they are used instead of passing through shared memory. One row takes larger
# tiles, as many programs of them as fit at once; several rows hold as many sums each and would have too few programs.
GATE_TILES = ((16, 4), (8, 4))  # of one row, of more
DOWN_TILES = ((64, 4), (32, 8))
ALIGNED = tl.constexpr(PART_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """A window's activations: q int8 [R, H], scale fp32 [R, H/G], correction int32 [R, H/G] (8 * sum of q; q4 only)."""

    q: torch.Tensor
    scale: torch.Tensor
    correction: torch.Tensor


@dataclass(frozen=True, slots=True)
class Jobs:
    """Distinct experts: expert int32 [J], -1 for none; pairs int32 [J, R], the pair of every row, -1 for none."""

    expert: torch.Tensor
    pairs: torch.Tensor


def quantise_rows(x: torch.Tensor, rows: QuantisedRows, group: int) -> None:
    """Fills `rows` from x fp32 [R, H]. One program for eight groups."""
    count, hidden = x.shape
    groups = hidden // group
    grid = (triton.cdiv(groups, 8), count)
    _quantise[grid](
        x, rows.q, rows.scale, rows.correction, GROUPS=groups, G=group, num_warps=4, enable_fp_fusion=False,
        **early.options(),
    )  # fmt: skip


def gate_up(
    layout: RecordLayout, addresses: torch.Tensor, jobs: Jobs, x: QuantisedRows, h: torch.Tensor,
    bell: doorbell.Word | None = None, ahead: Ahead | None = None,
) -> None:  # fmt: skip
    """h[p] = gate(gate dots, up dots) of every pair of the jobs; addresses int64 [E] of one layer, h fp32 [P, I].

    Meanwhile one program rings the bell, and others send for what is `ahead` where something misses.
    """
    rows, chosen = _sizes(layout, jobs)
    tile, warps = GATE_TILES[rows > 1]
    assert layout.intermediate % tile == 0, "groups are multiples of 32"
    assert ahead is None or rows == 1, rows
    feeds = 0 if ahead is None else LINES
    grid = (layout.intermediate // tile, jobs.expert.shape[0] + feeds + (bell is not None))
    word, number = (addresses, 0) if bell is None else (bell.at, bell.number)
    plan, resident, count = (
        (addresses, addresses, 0) if ahead is None else (ahead.plan, ahead.resident, len(ahead.plan))
    )
    _gate_up[grid](
        addresses, jobs.expert, jobs.pairs, x.q, x.scale, x.correction, h, word, number, plan, resident, count,
        RINGS=bell is not None, FEEDS=feeds, JP=triton.next_power_of_2(chosen), CODES=layout.gate_up_codes,
        SCALES=layout.gate_up_scales, H=layout.hidden, I=layout.intermediate,
        G=layout.format.group, BITS=layout.format.bits, K=chosen, R=rows, M=triton.next_power_of_2(rows),
        TILE=tile, num_warps=warps, enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


def down(
    layout: RecordLayout, addresses: torch.Tensor, jobs: Jobs, h: torch.Tensor, y: torch.Tensor,
    answer: doorbell.Word | None = None,
) -> None:  # fmt: skip
    """y[p] = down dots of h[p], quantised here, of every pair of the jobs; y fp32 [P, H].

    One program awaits the answer, and so does the launch.
    """
    rows, _ = _sizes(layout, jobs)
    tile, warps = DOWN_TILES[rows > 1]
    if layout.hidden % tile:  # sizes are multiples of 32
        tile = 32
    grid = (layout.hidden // tile, jobs.expert.shape[0] + (answer is not None))
    word, number = (addresses, 0) if answer is None else (answer.at, answer.number)
    _down[grid](
        addresses, jobs.expert, jobs.pairs, h, y, word, number, WAITS=answer is not None,
        CODES=layout.down_codes, SCALES=layout.down_scales, H=layout.hidden, I=layout.intermediate,
        G=layout.format.group, BITS=layout.format.bits, R=rows, M=triton.next_power_of_2(rows), TILE=tile,
        num_warps=warps, enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


def _sizes(layout: RecordLayout, jobs: Jobs) -> tuple[int, int]:
    """(R, K)."""
    most, rows = jobs.pairs.shape
    assert 1 <= rows <= MOST_ROWS, rows
    assert layout.format.group, "f32 records have no GPU kernel"
    return rows, most // rows


@triton.jit
def _quantise(x, q, scale, correction, GROUPS: tl.constexpr, G: tl.constexpr, EARLY: tl.constexpr):
    early.behind(EARLY)
    quantise_groups(x, q, scale, correction, tl.program_id(0), tl.program_id(1), GROUPS, G)


@triton.jit
def quantise_groups(x, q, scale, correction, eight, row, GROUPS: tl.constexpr, G: tl.constexpr):
    """The `eight`-th eight groups of a row; (their values [8, G], where those lie in the row, which exist)."""
    g = eight * 8 + tl.arange(0, 8)
    at = g[:, None] * G + tl.arange(0, G)[None, :]
    inside = (g < GROUPS)[:, None] & (at >= 0)
    values = tl.load(x + row * (GROUPS * G) + at, mask=inside, other=0.0)  # [8, G]
    s, reciprocal, usable = group_scale(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    n = quantised(values, reciprocal[:, None], usable[:, None])
    tl.store(q + row * (GROUPS * G) + at, n.to(tl.int8), mask=inside)
    tl.store(scale + row * GROUPS + g, s, mask=g < GROUPS)
    tl.store(correction + row * GROUPS + g, 8 * tl.sum(n, axis=1), mask=g < GROUPS)
    return values, at, inside


@triton.jit
def _load(codes, scales, row, first: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """(codes [1, N, C, WORDS], scales fp16 [1, N, C]) of groups first..first+7 of weight rows `row`; zeros behind.

    A row's codes are loaded as one run of words, so that a warp reads whole rows whatever order a compiler gives to
    dimensions of equal stride; taking the run apart moves nothing.
    """
    N: tl.constexpr = row.shape[0]
    g = first + tl.arange(0, CHAINS)
    word = first * WORDS + tl.arange(0, CHAINS * WORDS)[None, None, :]
    at = codes + row[None, :, None] * (GROUPS * WORDS) + word
    at_scale = scales + row[None, :, None] * GROUPS + g[None, None, :]
    # Codes are read once a token: they leave the cache to activations.
    if first + CHAINS <= GROUPS:
        c = tl.load(at, eviction_policy="evict_first")
        s = tl.load(at_scale)
    else:
        c = tl.load(at, mask=word < GROUPS * WORDS, other=0, eviction_policy="evict_first")
        s = tl.load(at_scale, mask=(g < GROUPS)[None, None, :], other=0.0)
    return tl.reshape(c, (1, N, CHAINS, WORDS)), s


@triton.jit
def _words(
    q, scale, correction, row, first: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """(low, high [M, 1, C, WORDS], s, correction [M, 1, C]) of groups first..first+7 of quantised rows, then zeros."""
    WORDS: tl.constexpr = G * BITS // 32
    g = first + tl.arange(0, CHAINS)
    inside = (g < GROUPS)[None, :] & (row >= 0)[:, None]  # [M, C]
    at = (q + row * (GROUPS * G)).to(tl.pointer_type(tl.int32))[:, None, None, None]
    at += g[None, None, :, None] * (G // 4) + tl.arange(0, WORDS)[None, None, None, :]
    low = tl.load(at, mask=inside[:, None, :, None], other=0)
    high = low
    if BITS == 4:
        high = tl.load(at + WORDS, mask=inside[:, None, :, None], other=0)
    at_group = (row[:, None] * GROUPS + g[None, :])[:, None, :]
    s = tl.load(scale + at_group, mask=inside[:, None, :], other=0.0)
    return low, high, s, tl.load(correction + at_group, mask=inside[:, None, :], other=0)


@triton.jit
def _fresh_words(h, pair, first: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr):
    """The same as `_words` from fp32 values: groups first..first+7 of h[pair], quantised."""
    WORDS: tl.constexpr = G * BITS // 32
    g = first + tl.arange(0, CHAINS)
    at = h + pair[:, None, None, None] * (GROUPS * G) + g[None, :, None, None] * G
    at += tl.arange(0, WORDS)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    inside = (g < GROUPS)[None, :, None, None] & (pair >= 0)[:, None, None, None]
    x = tl.load(at, mask=inside, other=0.0)  # [M, C, WORDS, 4]
    bits = _greatest(x)
    if BITS == 4:
        x_high = tl.load(at + G // 2, mask=inside, other=0.0)
        bits = tl.maximum(bits, _greatest(x_high))
    s, reciprocal, usable = group_scale(bits)
    low, total = _packed(x, reciprocal, usable)
    high = low
    if BITS == 4:
        high, total_high = _packed(x_high, reciprocal, usable)
        total += total_high
    return low[:, None, :, :], high[:, None, :, :], s[:, None, :], 8 * total[:, None, :]


@triton.jit
def _greatest(x):
    """Bits of the greatest absolute value of each group: x [M, C, WORDS, 4] to int32 [M, C]."""
    return tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3), axis=2)


@triton.jit
def _packed(x, reciprocal, usable):
    """x [M, C, WORDS, 4] as (words of four q, the first lowest [M, C, WORDS], sum of q [M, C])."""
    n = quantised(x, reciprocal[:, :, None, None], usable[:, :, None, None])
    words = tl.sum((n & 255) << (8 * tl.arange(0, 4)[None, None, None, :]), axis=3)
    return words, tl.sum(tl.sum(n, axis=3), axis=2)


@triton.jit
def _step(chains, codes, weights, low, high, s, correction, BITS: tl.constexpr):
    """Adds one group to each chain: chains [M, N, C]; the rest as `_load` and `_words` give it."""
    M: tl.constexpr = chains.shape[0]
    none = tl.zeros((M, codes.shape[1], codes.shape[2], codes.shape[3]), tl.int32)
    a = codes + none
    if BITS == 4:
        d = dot4_unsigned((a >> 4) & 0x0F0F0F0F, high + none, none)
        d = tl.sum(dot4_unsigned(a & 0x0F0F0F0F, low + none, d), axis=3) - correction
    else:
        d = tl.sum(dot4_signed(a, low + none, none), axis=3)
    return fma(d.to(tl.float32), weights.to(tl.float32) * s, chains)


@triton.jit
def _dot(chains):
    """[M, N, C] chains to [M, N]."""
    M: tl.constexpr = chains.shape[0]
    N: tl.constexpr = chains.shape[1]
    return tl.reshape(tree(tl.reshape(chains, (M * N, CHAINS))), (M, N))


@triton.jit
def _gate_up_rows(
    codes, scales, r, pair, q, scale, correction, h,
    H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """h of M pairs (-1: none) for intermediate elements r."""
    GROUPS: tl.constexpr = H // G
    WORDS: tl.constexpr = G * BITS // 32
    row = tl.where(pair >= 0, pair // K, -1)
    g = tl.zeros((pair.shape[0], r.shape[0], CHAINS), tl.float32)
    u = g
    # Two steps ahead: nothing is computed before the loads of three steps are on their way.
    gate0, gate_s0 = _load(codes, scales, r, 0, GROUPS, WORDS)
    up0, up_s0 = _load(codes, scales, r + I, 0, GROUPS, WORDS)
    gate1, gate_s1, up1, up_s1 = gate0, gate_s0, up0, up_s0
    if GROUPS > CHAINS:
        gate1, gate_s1 = _load(codes, scales, r, CHAINS, GROUPS, WORDS)
        up1, up_s1 = _load(codes, scales, r + I, CHAINS, GROUPS, WORDS)
    gate2, gate_s2, up2, up_s2 = gate1, gate_s1, up1, up_s1
    for first in tl.static_range(0, GROUPS, CHAINS):
        if first + 2 * CHAINS < GROUPS:
            gate2, gate_s2 = _load(codes, scales, r, first + 2 * CHAINS, GROUPS, WORDS)
            up2, up_s2 = _load(codes, scales, r + I, first + 2 * CHAINS, GROUPS, WORDS)
        low, high, s, c = _words(q, scale, correction, row, first, GROUPS, G, BITS)
        g = _step(g, gate0, gate_s0, low, high, s, c, BITS)
        u = _step(u, up0, up_s0, low, high, s, c, BITS)
        gate0, gate_s0, up0, up_s0 = gate1, gate_s1, up1, up_s1
        gate1, gate_s1, up1, up_s1 = gate2, gate_s2, up2, up_s2
    at = h + pair[:, None] * I + r[None, :]
    tl.store(at, gate(_dot(g), _dot(u)), mask=(pair >= 0)[:, None])


@triton.jit
def _gate_up_several(
    codes, scales, r, pairs, q, scale, correction, h, R: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The same for R pairs (-1: none) at `pairs`: every weight is loaded once, and the rows take their turns with it.

    Side by side they took 194 registers instead of 87: two programs a multiprocessor instead of five, those of the many
    experts that have one row included.
    """
    GROUPS: tl.constexpr = H // G
    WORDS: tl.constexpr = G * BITS // 32
    pair, row, g, u = (), (), (), ()
    for m in tl.static_range(R):
        pair = pair + (tl.load(pairs + m) + tl.zeros((1,), tl.int32),)
        row = row + (tl.where(pair[m] >= 0, pair[m] // K, -1),)
        g = g + (tl.zeros((1, r.shape[0], CHAINS), tl.float32),)
        u = u + (tl.zeros((1, r.shape[0], CHAINS), tl.float32),)
    gate0, gate_s0 = _load(codes, scales, r, 0, GROUPS, WORDS)
    up0, up_s0 = _load(codes, scales, r + I, 0, GROUPS, WORDS)
    gate1, gate_s1, up1, up_s1 = gate0, gate_s0, up0, up_s0
    for first in tl.static_range(0, GROUPS, CHAINS):
        if first + CHAINS < GROUPS:
            gate1, gate_s1 = _load(codes, scales, r, first + CHAINS, GROUPS, WORDS)
            up1, up_s1 = _load(codes, scales, r + I, first + CHAINS, GROUPS, WORDS)
        more_g, more_u = (), ()
        for m in tl.static_range(R):
            low, high, s, c = _words(q, scale, correction, row[m], first, GROUPS, G, BITS)
            more_g = more_g + (_step(g[m], gate0, gate_s0, low, high, s, c, BITS),)
            more_u = more_u + (_step(u[m], up0, up_s0, low, high, s, c, BITS),)
        g, u = more_g, more_u
        gate0, gate_s0, up0, up_s0 = gate1, gate_s1, up1, up_s1
    for m in tl.static_range(R):
        at = h + pair[m][:, None] * I + r[None, :]
        tl.store(at, gate(_dot(g[m]), _dot(u[m])), mask=(pair[m] >= 0)[:, None])


@triton.jit
def _down_rows(
    codes, scales, r, pair, h, y, H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y of M pairs (-1: none) for output elements r."""
    GROUPS: tl.constexpr = I // G
    WORDS: tl.constexpr = G * BITS // 32
    total = tl.zeros((pair.shape[0], r.shape[0], CHAINS), tl.float32)
    codes0, s0 = _load(codes, scales, r, 0, GROUPS, WORDS)
    codes1, s1 = codes0, s0
    early.behind(EARLY)
    for first in tl.static_range(0, GROUPS, CHAINS):
        if first + CHAINS < GROUPS:
            codes1, s1 = _load(codes, scales, r, first + CHAINS, GROUPS, WORDS)
        low, high, s, c = _fresh_words(h, pair, first, GROUPS, G, BITS)
        total = _step(total, codes0, s0, low, high, s, c, BITS)
        codes0, s0 = codes1, s1
    tl.store(y + pair[:, None] * H + r[None, :], _dot(total), mask=(pair >= 0)[:, None])


@triton.jit
def _job(addresses, experts, pairs, job, CODES: tl.constexpr, SCALES: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """(any work, codes, scales, pair [M], rows that have one) of a job."""
    expert = tl.load(experts + job)
    base = tl.load(addresses + tl.maximum(expert, 0))
    # The compiler does not see alignment through the cast; without it, loads are of four bytes.
    codes = tl.multiple_of((base + CODES).to(tl.pointer_type(tl.int32)), ALIGNED)
    scales = tl.multiple_of((base + SCALES).to(tl.pointer_type(tl.float16)), ALIGNED)
    m = tl.arange(0, M)
    pair = tl.load(pairs + job * R + m, mask=m < R, other=-1)
    return expert >= 0, codes, scales, pair, tl.sum((pair >= 0).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["number", "pieces"])
def _gate_up(
    addresses, experts, pairs, q, scale, correction, h, word, number, plan, resident, pieces, RINGS: tl.constexpr,
    FEEDS: tl.constexpr, JP: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr, R: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    job = tl.program_id(1) - RINGS
    if FEEDS and job >= R * K:
        program, programs = (job - R * K) * tl.num_programs(0) + tl.program_id(0), FEEDS * tl.num_programs(0)
        send(plan, pieces, experts, resident, program, programs, K, JP, EARLY)
    elif job >= 0:
        work, codes, scales, pair, count = _job(addresses, experts, pairs, job, CODES, SCALES, R, M)
        r = tl.program_id(0) * TILE + tl.arange(0, TILE)
        if work:
            if M == 1:
                _gate_up_rows(codes, scales, r, pair, q, scale, correction, h, H, I, G, BITS, K)
            else:
                # Most experts of a short window have one row: they pay for one.
                if count == 1:
                    one = tl.max(pair, axis=0) + tl.arange(0, 1)
                    _gate_up_rows(codes, scales, r, one, q, scale, correction, h, H, I, G, BITS, K)
                else:
                    _gate_up_several(codes, scales, r, pairs + job * R, q, scale, correction, h, R, H, I, G, BITS, K)
    else:
        if tl.program_id(0) == 0:
            doorbell.ring(word, number)


@triton.jit(do_not_specialize=["number"])
def _down(
    addresses, experts, pairs, h, y, word, number, WAITS: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Only h is of the launch in front.
    job = tl.program_id(1) - WAITS
    if job >= 0:
        work, codes, scales, pair, count = _job(addresses, experts, pairs, job, CODES, SCALES, R, M)
        r = tl.program_id(0) * TILE + tl.arange(0, TILE)
        if work:
            if M == 1:
                _down_rows(codes, scales, r, pair, h, y, H, I, G, BITS, EARLY)
            else:
                if count == 1:
                    _down_rows(codes, scales, r, tl.max(pair, axis=0) + tl.arange(0, 1), h, y, H, I, G, BITS, EARLY)
                else:
                    _down_rows(codes, scales, r, pair, h, y, H, I, G, BITS, EARLY)
        else:
            early.behind(EARLY)
    else:
        early.behind(EARLY)
        if tl.program_id(0) == 0:
            doorbell.wait(word, number)
