"""Routed experts of a decode window: gate-up with the gate, its result quantised, down; a launch each.

Records are read where `addresses` says they lie: a slot in VRAM or the expert's place in the pinned region. A miss is
only a slower pointer. A job is one distinct expert of the window, so its bytes cross the link once however many rows
chose it. Arithmetic, and so every bit, is that of docs/expert-arithmetic.md; lanes.kernels.naive spells it out.

Not here: which experts (route), the weighted sum (combine). Invariant: y[p] of every pair p that a job names is
written, nothing else; a job of -1 does nothing.

Letters: R rows (1..4), K experts per row, P = R * K pairs (pair r * K + k is row r's k-th expert), J = P jobs at most,
H hidden, I intermediate, G group, C = 8 chains.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import doorbell, early
from lanes.kernels.ahead import LINES, Ahead, send
from lanes.kernels.arithmetic import CHAINS, dot4_signed, dot4_unsigned, fma, gate, group_scale, quantised, tree
from lanes.kernels.rows import Jobs, QuantisedRows
from shared_experts.layout import PART_ALIGNMENT_BYTES, RecordLayout

MOST_ROWS = 4
# (Weight rows, warps) of a program, whatever the rows of a window: measured on an H200 (bench.gpu_kernels sweeps them).
# 128 threads make a step of q4g64 a 16-byte load per thread and matrix for every eight weight rows. Small scale tensors
# (fewer than the threads) are loaded where they are used instead of passing through shared memory.
GATE_TILE = (16, 4)
DOWN_TILE = (64, 4)
ALIGNED = tl.constexpr(PART_ALIGNMENT_BYTES)


def quantise_rows(x: torch.Tensor, rows: QuantisedRows, group: int, *, opens: bool = False) -> None:
    """Fills `rows` from x fp32 [R, H]. One program for eight groups. `opens`: between gate-up and down, which then
    begins to read its records while gate-up still reads its own."""
    count, hidden = x.shape
    groups = hidden // group
    grid = (triton.cdiv(groups, 8), count)
    _quantise[grid](
        x, rows.q, rows.scale, rows.correction, GROUPS=groups, G=group, OPENS=opens, num_warps=4,
        enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


def gate_up(
    layout: RecordLayout, addresses: torch.Tensor, jobs: Jobs, x: QuantisedRows, h: torch.Tensor,
    bell: doorbell.Word | None = None, ahead: Ahead | None = None,
) -> None:  # fmt: skip
    """h[p] = gate(gate dots, up dots) of every pair of the jobs; addresses int64 [E] of one layer, h fp32 [P, I].

    Meanwhile one program rings the bell, and others send for what is `ahead` where something misses.
    """
    rows, chosen = _sizes(layout, jobs)
    tile, warps = GATE_TILE
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
        SCALES=layout.gate_up_scales, H=layout.hidden, I=layout.intermediate, G=layout.format.group,
        BITS=layout.format.bits, K=chosen, R=rows, TILE=tile, num_warps=warps, enable_fp_fusion=False,
        **early.options(),
    )  # fmt: skip


def down(
    layout: RecordLayout, addresses: torch.Tensor, jobs: Jobs, h: QuantisedRows, y: torch.Tensor,
    answer: doorbell.Word | None = None,
) -> None:  # fmt: skip
    """y[p] = down dots of h[p] of every pair of the jobs; h is what gate_up left, quantised; y fp32 [P, H].

    One program awaits the answer, and so does the launch.
    """
    rows, _ = _sizes(layout, jobs)
    tile, warps = DOWN_TILE
    if layout.hidden % tile:  # sizes are multiples of 32
        tile = 32
    grid = (layout.hidden // tile, jobs.expert.shape[0] + (answer is not None))
    word, number = (addresses, 0) if answer is None else (answer.at, answer.number)
    _down[grid](
        addresses, jobs.expert, jobs.pairs, h.q, h.scale, h.correction, y, word, number, WAITS=answer is not None,
        CODES=layout.down_codes, SCALES=layout.down_scales, H=layout.hidden, I=layout.intermediate,
        G=layout.format.group, BITS=layout.format.bits, R=rows, TILE=tile, num_warps=warps, enable_fp_fusion=False,
        **early.options(),
    )  # fmt: skip


def _sizes(layout: RecordLayout, jobs: Jobs) -> tuple[int, int]:
    """(R, K)."""
    most, rows = jobs.pairs.shape
    assert 1 <= rows <= MOST_ROWS, rows
    assert layout.format.group, "f32 records have no GPU kernel"
    return rows, most // rows


@triton.jit
def _quantise(x, q, scale, correction, GROUPS: tl.constexpr, G: tl.constexpr, OPENS: tl.constexpr, EARLY: tl.constexpr):
    if OPENS:
        early.open_next(EARLY)
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
def _gate_up_row(
    codes, scales, r, pair, q, scale, correction, h, H: tl.constexpr, I: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """h of a pair, int32 [1], for intermediate elements r."""
    GROUPS: tl.constexpr = H // G
    WORDS: tl.constexpr = G * BITS // 32
    g = tl.zeros((1, r.shape[0], CHAINS), tl.float32)
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
        low, high, s, c = _words(q, scale, correction, pair // K, first, GROUPS, G, BITS)
        g = _step(g, gate0, gate_s0, low, high, s, c, BITS)
        u = _step(u, up0, up_s0, low, high, s, c, BITS)
        gate0, gate_s0, up0, up_s0 = gate1, gate_s1, up1, up_s1
        gate1, gate_s1, up1, up_s1 = gate2, gate_s2, up2, up_s2
    tl.store(h + pair[:, None] * I + r[None, :], gate(_dot(g), _dot(u)))


@triton.jit
def _gate_up_rows(
    codes, scales, r, pairs, q, scale, correction, h, R: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The same for R pairs (-1: none) at `pairs`, by turns: weights are loaded once, over the link, too."""
    GROUPS: tl.constexpr = H // G
    WORDS: tl.constexpr = G * BITS // 32
    pair, row, g, u = (), (), (), ()
    for m in tl.static_range(R):
        pair = pair + (tl.load(pairs + m + tl.arange(0, 1)),)
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
def _down_row(
    codes, scales, r, pair, q, scale, correction, y, H: tl.constexpr, I: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y of a pair, int32 [1], for output elements r."""
    GROUPS: tl.constexpr = I // G
    WORDS: tl.constexpr = G * BITS // 32
    total = tl.zeros((1, r.shape[0], CHAINS), tl.float32)
    codes0, s0 = _load(codes, scales, r, 0, GROUPS, WORDS)
    codes1, s1 = codes0, s0
    if GROUPS > CHAINS:
        codes1, s1 = _load(codes, scales, r, CHAINS, GROUPS, WORDS)
    early.behind(EARLY)
    for first in tl.static_range(0, GROUPS, CHAINS):
        low, high, s, c = _words(q, scale, correction, pair, first, GROUPS, G, BITS)
        total = _step(total, codes0, s0, low, high, s, c, BITS)
        codes0, s0 = codes1, s1
        if first + 2 * CHAINS < GROUPS:
            codes1, s1 = _load(codes, scales, r, first + 2 * CHAINS, GROUPS, WORDS)
    tl.store(y + pair[:, None] * H + r[None, :], _dot(total))


@triton.jit
def _down_rows(
    codes, scales, r, pairs, q, scale, correction, y, R: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same for R pairs (-1: none) at `pairs`, by turns."""
    GROUPS: tl.constexpr = I // G
    WORDS: tl.constexpr = G * BITS // 32
    pair, total = (), ()
    for m in tl.static_range(R):
        pair = pair + (tl.load(pairs + m + tl.arange(0, 1)),)
        total = total + (tl.zeros((1, r.shape[0], CHAINS), tl.float32),)
    codes0, s0 = _load(codes, scales, r, 0, GROUPS, WORDS)
    early.behind(EARLY)
    for first in tl.static_range(0, GROUPS, CHAINS):
        if first:
            codes0, s0 = _load(codes, scales, r, first, GROUPS, WORDS)
        more = ()
        for m in tl.static_range(R):
            low, high, s, c = _words(q, scale, correction, pair[m], first, GROUPS, G, BITS)
            more = more + (_step(total[m], codes0, s0, low, high, s, c, BITS),)
        total = more
    for m in tl.static_range(R):
        tl.store(y + pair[m][:, None] * H + r[None, :], _dot(total[m]), mask=(pair[m] >= 0)[:, None])


@triton.jit
def _job(addresses, experts, job, CODES: tl.constexpr, SCALES: tl.constexpr):
    """(any work, codes, scales) of a job."""
    expert = tl.load(experts + job)
    base = tl.load(addresses + tl.maximum(expert, 0))
    # The compiler does not see alignment through the cast; without it, loads are of four bytes.
    codes = tl.multiple_of((base + CODES).to(tl.pointer_type(tl.int32)), ALIGNED)
    scales = tl.multiple_of((base + SCALES).to(tl.pointer_type(tl.float16)), ALIGNED)
    return expert >= 0, codes, scales


@triton.jit
def _only(pairs, R: tl.constexpr):
    """(rows of a job that have a pair, one of their pairs [1]). Most experts of a short window have one row."""
    pair = tl.load(pairs + tl.arange(0, 1))
    count = 1
    if R > 1:
        count = (tl.sum(pair, axis=0) >= 0).to(tl.int32)
        for m in tl.static_range(1, R):
            other = tl.load(pairs + m + tl.arange(0, 1))
            count += (tl.sum(other, axis=0) >= 0).to(tl.int32)
            pair = tl.maximum(pair, other)
    return count, pair


@triton.jit(do_not_specialize=["number", "pieces"])
def _gate_up(
    addresses, experts, pairs, q, scale, correction, h, word, number, plan, resident, pieces, RINGS: tl.constexpr,
    FEEDS: tl.constexpr, JP: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    G: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    job = tl.program_id(1) - RINGS
    if FEEDS and job >= R * K:
        program, programs = (job - R * K) * tl.num_programs(0) + tl.program_id(0), FEEDS * tl.num_programs(0)
        send(plan, pieces, experts, resident, program, programs, K, JP, EARLY)
    elif job >= 0:
        work, codes, scales = _job(addresses, experts, job, CODES, SCALES)
        r = tl.program_id(0) * TILE + tl.arange(0, TILE)
        pairs += job * R
        if work:
            count, pair = _only(pairs, R)
            if count == 1:
                _gate_up_row(codes, scales, r, pair, q, scale, correction, h, H, I, G, BITS, K)
            else:
                for part in tl.range(0, TILE, TILE // 2, num_stages=1):
                    half = tl.program_id(0) * TILE + part + tl.arange(0, TILE // 2)
                    _gate_up_rows(codes, scales, half, pairs, q, scale, correction, h, R, H, I, G, BITS, K)
    else:
        if tl.program_id(0) == 0:
            doorbell.ring(word, number)


@triton.jit(do_not_specialize=["number"])
def _down(
    addresses, experts, pairs, q, scale, correction, y, word, number, WAITS: tl.constexpr, CODES: tl.constexpr,
    SCALES: tl.constexpr, H: tl.constexpr, I: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Only what was quantised is of the launch in front.
    job = tl.program_id(1) - WAITS
    if job >= 0:
        work, codes, scales = _job(addresses, experts, job, CODES, SCALES)
        r = tl.program_id(0) * TILE + tl.arange(0, TILE)
        pairs += job * R
        if work:
            count, pair = _only(pairs, R)
            if count == 1:
                _down_row(codes, scales, r, pair, q, scale, correction, y, H, I, G, BITS, EARLY)
            else:
                for part in tl.range(0, TILE, TILE // 2, num_stages=1):
                    half = tl.program_id(0) * TILE + part + tl.arange(0, TILE // 2)
                    _down_rows(codes, scales, half, pairs, q, scale, correction, y, R, H, I, G, BITS, EARLY)
        else:
            early.behind(EARLY)
    else:
        early.behind(EARLY)
        if tl.program_id(0) == 0:
            doorbell.wait(word, number)
