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
from lanes.kernels.experts import MOST_ROWS, quantise_groups
from lanes.kernels.jobs import MOST_EXPERTS, all_counts, assign, width
from lanes.kernels.post import Post
from lanes.kernels.rows import Jobs


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
        num_warps=padded, enable_fp_fusion=False, **early.options(),
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
    """(id, pair, whether it counts, whether the CPU has it) of every place."""
    # [high, row, low]: a warp has a row, each of its lanes experts side by side, so that a search needs no barrier.
    LOW: tl.constexpr = 16 if EP >= 512 else (EP // 32 if EP >= 32 else 1)
    JP: tl.constexpr = width(KP)
    r = tl.arange(0, RP)[None, :, None]
    e = tl.arange(0, EP // LOW)[:, None, None] * LOW + tl.arange(0, LOW)[None, None, :]
    inside = (r < R) & (e < E)
    x = tl.load(logits + r * stride + e, mask=inside, other=float("-inf"))
    # Whether an expert misses goes with its number, so that nothing is looked up for those that are chosen.
    code = 2 * e + (tl.load(resident + e + 0 * r, mask=inside, other=1) == 0).to(tl.int32)
    counts = all_counts(cpu_of_misses, R, K)
    x = tl.where(r < R, x, 0.0)

    # Ordered as values are; + 0.0 makes -0 equal to 0. Two searches of 32 bits, the greatest and the lowest id that has
    # it, each take a warp one instruction where one search of 64 takes ten.
    least: tl.constexpr = -(1 << 31)  # of no value
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    left = tl.where(inside, bits, least)
    j = tl.arange(0, JP)[None, None, :]
    found, tops = tl.zeros((1, RP, JP), tl.int32), tl.zeros((1, RP, JP), tl.int32)
    for k in tl.static_range(K):
        best = tl.max(tl.max(left, axis=2), axis=0)  # [RP]
        first = tl.min(tl.min(tl.where(left == best[None, :, None], code, 2 * EP), axis=2), axis=0)
        left = tl.where(code == first[None, :, None], least, left)
        found = tl.where(j == k, first[None, :, None], found)
        tops = tl.where(j == k, best[None, :, None], tops)

    value = (tops ^ ((tops >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    highest = _of_rows(tl.where(j == 0, value, 0.0))
    p = tl.where((r < R) & (j < K), tl.exp(value - highest), 0.0)
    total = _of_rows(p) if NORMALISE else _of_rows(tl.where(e < E, tl.exp(x - highest), 0.0))
    p /= tl.where(r < R, total, 1.0)
    id, pair, known, on_cpu = assign(tl.reshape(found, (RP, JP)), counts, job_expert, job_pairs, slots, R, K, KP)
    tl.store(ids + pair, id, mask=known)
    tl.store(weights + pair, tl.reshape(p, (RP * JP,)), mask=known)
    return id, pair, known, on_cpu


@triton.jit
def _of_rows(x):
    """Sums [1, RP, 1] of [., RP, .]."""
    return tl.sum(tl.sum(x, axis=2), axis=0)[None, :, None]
