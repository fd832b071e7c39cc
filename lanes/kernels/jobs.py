"""From who chose which expert to work: jobs for the GPU, the CPU's share of the misses, where its rows will lie.

`assign` is the part that routing (lanes.kernels.route) and a window whose experts are known already (`jobs`) share. The
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
    experts = resident.shape[0]
    assert 1 <= rows <= MOST_ROWS, rows
    assert chosen <= experts <= MOST_EXPERTS, (chosen, experts)
    padded = triton.next_power_of_2(rows)
    _jobs[(1,)](
        ids, resident, cpu_of_misses, out.expert, out.pairs, slots, R=rows, RP=padded, K=chosen, E=experts,
        EP=triton.next_power_of_2(experts), JP=triton.next_power_of_2(rows * chosen), num_warps=padded,
    )  # fmt: skip


@triton.jit
def _jobs(
    ids, resident, cpu_of_misses, job_expert, job_pairs, slots, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, JP: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)
    e = tl.arange(0, EP)
    found = tl.zeros((RP, EP), tl.int32)
    for k in tl.static_range(K):
        id = tl.load(ids + r * K + k, mask=r < R, other=-1)
        found |= (id[:, None] == e[None, :]).to(tl.int32)
    chosen = (found != 0) & (e < E)[None, :]
    pair = r[:, None] * K + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    assign(chosen, pair, resident, cpu_of_misses, job_expert, job_pairs, slots, R, RP, K, EP, JP)


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
