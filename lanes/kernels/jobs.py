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
    """Every pair against every other: a window has few pairs and many experts."""
    P: tl.constexpr = R * K
    p = tl.arange(0, PP)
    id = tl.load(ids + p, mask=p < P, other=-1)  # the pairs behind the last one are before all others
    missing = tl.load(resident + id, mask=p < P, other=1) == 0
    lower = id[None, :] < id[:, None]  # [p, q]: q's expert is lower than p's
    same = id[None, :] == id[:, None]
    earlier = p[None, :] < p[:, None]
    first = (tl.max((same & earlier).to(tl.int32), axis=1) == 0) & (p < P)

    # Of distinct missing experts: how many there are, and how many are lower than each.
    missed = (first & missing).to(tl.int32)
    rank = tl.sum(lower.to(tl.int32) * missed[None, :], axis=1)
    on_cpu = missing & (rank < tl.load(cpu_of_misses + tl.sum(missed, axis=0)))
    ours = (p < P) & (on_cpu == 0)
    first_ours = (first & ours).to(tl.int32)
    job = tl.where(ours, tl.sum(lower.to(tl.int32) * first_ours[None, :], axis=1), -1)

    j = tl.arange(0, PP)
    mine = job[None, :] == j[:, None]  # [job, pair]
    tl.store(job_expert + j, tl.max(tl.where(mine, id[None, :], -1), axis=1), mask=j < P)
    for r in tl.static_range(R):
        of_row = mine & ((p >= r * K) & (p < r * K + K))[None, :]
        tl.store(job_pairs + j * R + r, tl.max(tl.where(of_row, p[None, :], -1), axis=1), mask=j < P)

    # The CPU's rows lie by (expert, row).
    before = (lower | (same & earlier)).to(tl.int32) * on_cpu.to(tl.int32)[None, :]
    tl.store(slots + p, tl.where(on_cpu, tl.sum(before, axis=1), -1), mask=p < P)


@triton.jit
def assign(
    chosen, pair, resident, cpu_of_misses, job_expert, job_pairs, slots, R: tl.constexpr, RP: tl.constexpr,
    K: tl.constexpr, EP: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    """chosen [RP, EP], whether a row takes an expert; pair [RP, EP], its number where it does."""
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    count = tl.sum(chosen.to(tl.int32), axis=0)  # [EP] rows of each expert
    wanted = count > 0
    misses = wanted & (tl.load(resident + e, mask=wanted, other=1) == 0)
    missing = misses.to(tl.int32)
    on_cpu = misses & (tl.cumsum(missing, axis=0) <= tl.load(cpu_of_misses + tl.sum(missing, axis=0)))
    ours = wanted & (on_cpu == 0)
    job = tl.cumsum(ours.to(tl.int32), axis=0) - 1
    tl.store(job_expert + job, e, mask=ours)
    at = job_pairs + job[None, :] * R + r[:, None]
    tl.store(at, tl.where(chosen, pair, -1), mask=ours[None, :] & (r < R)[:, None])
    unused = tl.arange(0, JP)
    tl.store(job_expert + unused, -1, mask=(unused >= tl.sum(ours.to(tl.int32), axis=0)) & (unused < R * K))

    # The CPU's rows lie by (expert, row): the rows of lower experts come before, then the lower rows of this one.
    cpu_rows = tl.where(on_cpu, count, 0)
    before = tl.cumsum(cpu_rows, axis=0) - cpu_rows
    slot = before[None, :] + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(slots + pair, tl.where(on_cpu[None, :], slot, -1), mask=chosen)
