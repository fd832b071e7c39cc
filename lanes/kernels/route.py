"""Router logits to all that a layer's experts need: ids, weights, jobs for the GPU, slots of the CPU's rows, counters.

One program for the window: a row's K greatest logits (equal ones: the lowest id), softmax over all of them, the weights
made to sum to 1; then what lanes.kernels.jobs makes of the choice. Not here: the product with the router's matrix.

Invariant: ids are distinct, in range and ascending in a row whatever the logits are, NaN included (NaN ranks highest).

Letters: R rows (1..4), E experts, K experts per row, P = R * K pairs, J = P jobs at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.experts import MOST_ROWS, Jobs
from lanes.kernels.jobs import MOST_EXPERTS, assign


@dataclass(frozen=True, slots=True)
class Routed:
    """What `route` fills: ids int32 [R, K], weights fp32 [R, K], jobs, slots int32 [P] (-1: computed by the GPU)."""

    ids: torch.Tensor
    weights: torch.Tensor
    jobs: Jobs
    slots: torch.Tensor


def route(
    logits: torch.Tensor, resident: torch.Tensor, cpu_of_misses: torch.Tensor, uses: torch.Tensor, out: Routed,
    *, normalise: bool,
) -> None:  # fmt: skip
    """logits fp32 [R, at least E], rows any distance apart; resident int8 [E]; cpu_of_misses int32 [P + 1]; uses int32
    [E] gains the window's rows of each expert."""  # fmt: skip
    rows, chosen = out.ids.shape
    experts = resident.shape[0]
    assert 1 <= rows <= MOST_ROWS, rows
    assert chosen <= experts <= MOST_EXPERTS, (chosen, experts)
    padded = triton.next_power_of_2(rows)
    _route[(1,)](
        logits, logits.stride(0), resident, cpu_of_misses, uses, out.ids, out.weights, out.jobs.expert,
        out.jobs.pairs, out.slots, R=rows, RP=padded, K=chosen, E=experts, EP=triton.next_power_of_2(experts),
        JP=triton.next_power_of_2(rows * chosen), NORMALISE=normalise,
        num_warps=padded,  # a warp a row: the K searches need no barrier
        **early.options(),
    )  # fmt: skip


@triton.jit
def _route(
    logits, stride, resident, cpu_of_misses, uses, ids, weights, job_expert, job_pairs, slots, R: tl.constexpr,
    RP: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, JP: tl.constexpr, NORMALISE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    inside = (r < R)[:, None] & (e < E)[None, :]
    x = tl.load(logits + r[:, None] * stride + e[None, :], mask=inside, other=float("-inf"))  # [RP, EP]
    x = tl.where((r < R)[:, None], x, 0.0)

    # Ordered as values are; + 0.0 makes -0 equal to 0. Two searches of 32 bits, the greatest and the lowest id that has
    # it, each take a warp one instruction where one search of 64 takes ten.
    least: tl.constexpr = -(1 << 31)  # of no value
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    left = tl.where(inside, bits, least)
    for _ in tl.static_range(K):
        best = tl.max(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], e[None, :], EP), axis=1)
        left = tl.where(e[None, :] == first[:, None], least, left)
    chosen = (left == least) & inside  # [RP, EP]

    highest = tl.max(x, axis=1)
    p = tl.exp(x - highest[:, None])
    total = tl.sum(tl.where(chosen, p, 0.0), axis=1) if NORMALISE else tl.sum(p, axis=1)
    total = tl.where(r < R, total, 1.0)
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1  # k of a chosen expert
    pair = r[:, None] * K + place
    tl.store(ids + pair, e[None, :] + tl.zeros((RP, EP), tl.int32), mask=chosen)
    tl.store(weights + pair, p / total[:, None], mask=chosen)

    count = tl.sum(chosen.to(tl.int32), axis=0)  # [EP] rows of each expert
    seen = tl.load(uses + e, mask=count > 0, other=0)
    tl.store(uses + e, seen + count, mask=count > 0)
    assign(chosen, pair, resident, cpu_of_misses, job_expert, job_pairs, slots, R, RP, K, EP, JP)
