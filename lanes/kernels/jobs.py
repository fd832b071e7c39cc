"""From who chose which expert to work: jobs for the GPU, the CPU's share of the misses, where its rows will lie.

`assign` is part of routing (lanes.kernels.route); `jobs` does the same for a window whose experts are known. The
rule is that of lanes.experts.split: of a layer's distinct missing experts, ascending, the CPU takes the first
`cpu_of_misses[count]`.

Letters: R rows (1..4), E experts, K experts per row, P = R * K pairs, J = P jobs at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels.experts import MOST_ROWS, Jobs

MOST_EXPERTS = 1024  # a row of them stays in a warp's registers


def jobs(
    ids: torch.Tensor, resident: torch.Tensor, cpu_of_misses: torch.Tensor, out: Jobs, slots: torch.Tensor
) -> None:
    """Fills `out` and slots int32 [P] (-1: computed by the GPU) from ids int32 [R, K], distinct and ascending in a row.

    resident int8 [E] of the layer, cpu_of_misses int32 [P + 1].
    """
    rows, chosen = ids.shape
    assert 1 <= rows <= MOST_ROWS, rows
    assert chosen <= resident.shape[0] <= MOST_EXPERTS, (chosen, resident.shape)
    _jobs[(1,)](
        ids, resident, cpu_of_misses, out.expert, out.pairs, slots, R=rows, K=chosen,
        PP=triton.next_power_of_2(rows * chosen), num_warps=triton.next_power_of_2(rows),
    )  # fmt: skip


@triton.jit
def _jobs(
    ids, resident, cpu_of_misses, job_expert, job_pairs, slots, R: tl.constexpr, K: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    counts = all_counts(cpu_of_misses, R, K)
    p = tl.arange(0, PP)
    known = p < R * K
    id = tl.load(ids + p, mask=known, other=-1)
    missing = tl.load(resident + id, mask=known, other=1) == 0
    assign(id, missing, p, known, counts, job_expert, job_pairs, slots, R, K)


@triton.jit
def all_counts(cpu_of_misses, R: tl.constexpr, K: tl.constexpr):
    """The whole table, so that nothing waits for a number to look up."""
    TABLE: tl.constexpr = 64 if R * K < 64 else 1024
    i = tl.arange(0, TABLE)
    return tl.load(cpu_of_misses + i, mask=i <= R * K, other=0)


@triton.jit
def assign(id, missing, pair, known, counts, job_expert, job_pairs, slots, R: tl.constexpr, K: tl.constexpr):
    """Of places [PP] in any order that hold a pair each where `known`: its expert (-1 where not), whether that is not
    resident, its number. Every place against every other: a window has few pairs and many experts. Returns whether
    its expert is the CPU's."""
    PP: tl.constexpr = id.shape[0]
    lower = id[None, :] < id[:, None]  # [p, q]: q's expert is lower than p's
    same = id[None, :] == id[:, None]
    earlier = pair[None, :] < pair[:, None]
    first = (tl.max((same & earlier & known[None, :]).to(tl.int32), axis=1) == 0) & known

    # Of distinct missing experts: how many there are, and how many are lower than each.
    missed = (first & missing).to(tl.int32)
    rank = tl.sum(lower.to(tl.int32) * missed[None, :], axis=1)
    share = tl.sum(tl.where(tl.arange(0, counts.shape[0]) == tl.sum(missed, axis=0), counts, 0), axis=0)
    on_cpu = missing & (rank < share)
    ours = known & (on_cpu == 0)
    first_ours = (first & ours).to(tl.int32)
    job = tl.where(ours, tl.sum(lower.to(tl.int32) * first_ours[None, :], axis=1), -1)

    j = tl.arange(0, PP)
    mine = job[None, :] == j[:, None]  # [job, place]
    tl.store(job_expert + j, tl.max(tl.where(mine, id[None, :], -1), axis=1), mask=j < R * K)
    for r in tl.static_range(R):
        of_row = mine & ((pair >= r * K) & (pair < r * K + K))[None, :]
        tl.store(job_pairs + j * R + r, tl.max(tl.where(of_row, pair[None, :], -1), axis=1), mask=j < R * K)

    # The CPU's rows lie by (expert, row).
    before = (lower | (same & earlier)).to(tl.int32) * (on_cpu & known).to(tl.int32)[None, :]
    tl.store(slots + pair, tl.where(on_cpu, tl.sum(before, axis=1), -1), mask=known)
    return on_cpu
