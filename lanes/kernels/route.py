"""Router logits to all that a layer's experts need: ids, weights, jobs for the GPU, slots of the CPU's rows.

One program for the window: a row's K greatest logits (equal ones: the lowest id), softmax over all of them, the weights
made to sum to 1; then what lanes.kernels.jobs makes of the choice. Beside it others quantise the rows, and all of them
do what lanes.kernels.post would do behind. Not here: the product with the router's matrix.

Invariant: ids are distinct, in range and ascending in a row whatever the logits are, NaN included (NaN ranks highest).

Letters: R rows (1..4), E experts, K experts per row, P = R * K pairs, J = P jobs at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.experts import MOST_ROWS, Jobs, quantise_groups
from lanes.kernels.jobs import MOST_EXPERTS, all_counts, assign
from lanes.kernels.post import Post


@dataclass(frozen=True, slots=True)
class Routed:
    """What `route` fills: ids int32 [R, K], weights fp32 [R, K], jobs, slots int32 [P] (-1: computed by the GPU)."""

    ids: torch.Tensor
    weights: torch.Tensor
    jobs: Jobs
    slots: torch.Tensor


def route(
    logits: torch.Tensor, resident: torch.Tensor, cpu_of_misses: torch.Tensor, out: Routed, *, normalise: bool,
    posted: Post | None = None,
) -> None:  # fmt: skip
    """logits fp32 [R, at least E], rows any distance apart; resident int8 [E]; cpu_of_misses int32 [P + 1].

    With `posted` it leaves what lanes.kernels.post leaves, bit for bit.
    """
    rows, chosen = out.ids.shape
    experts = resident.shape[0]
    assert 1 <= rows <= MOST_ROWS, rows
    assert chosen <= experts <= MOST_EXPERTS, (chosen, experts)
    padded = triton.next_power_of_2(rows)
    none, p = out.ids, posted
    said, to_host, groups, eights = (none,) * 5, (none,) * 3, 0, 0
    if p is not None:
        groups = p.x.shape[1] // p.group
        eights, said = triton.cdiv(groups, 8), (p.x, p.rows.q, p.rows.scale, p.rows.correction, p.log)
        if p.inputs is not None:
            to_host = (p.inputs.head, p.inputs.ids, p.inputs.x)
    _route[(1 + rows * eights,)](
        logits, logits.stride(0), resident, cpu_of_misses, out.ids, out.weights, out.jobs.expert, out.jobs.pairs,
        out.slots, *said, *to_host, 0 if p is None else p.layer, GROUPS=groups, G=0 if p is None else p.group,
        EIGHTS=eights, SHARED=p is not None and p.inputs is not None, R=rows, RP=padded, K=chosen,
        KP=triton.next_power_of_2(chosen), E=experts, EP=triton.next_power_of_2(experts), NORMALISE=normalise,
        num_warps=padded,  # a warp a row: the K searches need no barrier
        enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _route(
    logits, stride, resident, cpu_of_misses, ids, weights, job_expert, job_pairs, slots, x, q, scale, correction, log,
    head, to_ids, to_x, layer, GROUPS: tl.constexpr, G: tl.constexpr, EIGHTS: tl.constexpr, SHARED: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    NORMALISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    program = tl.program_id(0)
    if program == 0:
        id, pair, known, on_cpu = _choose(
            logits, stride, resident, cpu_of_misses, ids, weights, job_expert, job_pairs, slots, R, RP, K, KP, E, EP,
            NORMALISE,
        )  # fmt: skip
        if EIGHTS:
            tl.store(log + pair, 2 * id + on_cpu.to(tl.int32), mask=known)
            if SHARED:
                tl.store(to_ids + pair, tl.where(on_cpu, id, -1 - id), mask=known)
                tl.store(head, layer)
                tl.store(head + 1, R)
    else:
        if EIGHTS:
            row, eight = (program - 1) // EIGHTS, (program - 1) % EIGHTS
            values, at, inside = quantise_groups(x, q, scale, correction, eight, row, GROUPS, G)
            if SHARED:
                tl.store(to_x + row * (GROUPS * G) + at, values, mask=inside)


@triton.jit
def _choose(
    logits, stride, resident, cpu_of_misses, ids, weights, job_expert, job_pairs, slots, R: tl.constexpr,
    RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """(id, pair, known, whether the CPU has it) of every place."""
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    inside = (r < R)[:, None] & (e < E)[None, :]
    x = tl.load(logits + r[:, None] * stride + e[None, :], mask=inside, other=float("-inf"))  # [RP, EP]
    # Whether an expert misses goes with its number, so that nothing is looked up for those that are chosen.
    code = 2 * e + (tl.load(resident + e, mask=e < E, other=1) == 0).to(tl.int32)
    counts = all_counts(cpu_of_misses, R, K)
    x = tl.where((r < R)[:, None], x, 0.0)

    # Ordered as values are; + 0.0 makes -0 equal to 0. Two searches of 32 bits, the greatest and the lowest id that has
    # it, each take a warp one instruction where one search of 64 takes ten.
    least: tl.constexpr = -(1 << 31)  # of no value
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    left = tl.where(inside, bits, least)
    j = tl.arange(0, KP)
    found, tops = tl.zeros((RP, KP), tl.int32), tl.zeros((RP, KP), tl.int32)
    for k in tl.static_range(K):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], code[None, :], 2 * EP), axis=1)
        left = tl.where(code[None, :] == first[:, None], least, left)
        mine = (j == k)[None, :]
        found, tops = tl.where(mine, first[:, None], found), tl.where(mine, best[:, None], tops)

    known = (r < R)[:, None] & (j < K)[None, :]
    id, missing = found >> 1, (found & 1) != 0
    value = (tops ^ ((tops >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    highest = tl.sum(tl.where((j == 0)[None, :], value, 0.0), axis=1)
    p = tl.where(known, tl.exp(value - highest[:, None]), 0.0)
    total = tl.sum(p, axis=1) if NORMALISE else tl.sum(tl.exp(x - highest[:, None]), axis=1)
    total = tl.where(r < R, total, 1.0)
    lower = (id[:, None, :] < id[:, :, None]) & (j < K)[None, None, :]
    pair = r[:, None] * K + tl.sum(lower.to(tl.int32), axis=2)  # ascending in a row
    tl.store(ids + pair, id, mask=known)
    tl.store(weights + pair, p / total[:, None], mask=known)
    PP: tl.constexpr = RP * KP
    known, pair = tl.reshape(known, (PP,)), tl.reshape(pair, (PP,))
    id, missing = tl.where(known, tl.reshape(id, (PP,)), -1), tl.reshape(missing, (PP,)) & known
    on_cpu = assign(id, missing, pair, known, counts, job_expert, job_pairs, slots, R, K)
    return id, pair, known, on_cpu
