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

from lanes.kernels.experts import MOST_ROWS
from lanes.kernels.rows import Jobs

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
    padded = triton.next_power_of_2(rows)
    _jobs[(1,)](
        ids, resident, cpu_of_misses, out.expert, out.pairs, slots, R=rows, RP=padded, K=chosen,
        KP=triton.next_power_of_2(chosen), num_warps=padded,
    )  # fmt: skip


@triton.jit
def _jobs(
    ids, resident, cpu_of_misses, job_expert, job_pairs, slots, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    counts = all_counts(cpu_of_misses, R, K)
    r, j = tl.arange(0, RP)[:, None], tl.arange(0, width(KP))[None, :]
    known = (r < R) & (j < K)
    id = tl.load(ids + r * K + j, mask=known, other=0)
    absent = tl.load(resident + id, mask=known, other=1) == 0
    assign(2 * id + absent.to(tl.int32), counts, job_expert, job_pairs, slots, R, K, KP)


@triton.jit
def all_counts(cpu_of_misses, R: tl.constexpr, K: tl.constexpr):
    """The whole table, so that nothing waits for a number to look up."""
    TABLE: tl.constexpr = 64 if R * K < 64 else 1024
    i = tl.arange(0, TABLE)
    return tl.load(cpu_of_misses + i, mask=i <= R * K, other=0)


@triton.constexpr_function
def width(chosen):
    """Places of a row, a lane of its warp each: at least as many as experts are chosen, rounded up."""
    return max(32, int(chosen))


@triton.constexpr_function
def _power(count):
    return 1 << (int(count) - 1).bit_length()


@triton.jit
def assign(codes, counts, job_expert, job_pairs, slots, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr):
    """Jobs and slots: codes int32 [RP, width(KP)], of which the first K of R rows count, are 2 * id of an expert, and 1
    more where it is not resident. Returns (id, pair, whether it counts, whether the CPU has it) of all places.

    Every place p, a lane's, is compared with the pairs q of all rows, which every thread has in its registers.
    """
    RP: tl.constexpr = codes.shape[0]
    JP: tl.constexpr = codes.shape[1]
    every = tl.arange(0, _power(R * R * K))
    tl.store(job_pairs + every, -1, mask=every < R * R * K)
    place = tl.arange(0, RP * JP)
    row, known = place // JP, (place // JP < R) & (place % JP < K)
    code = tl.reshape(codes, (RP * JP,))
    id, missing = tl.where(known, code >> 1, -1), ((code & 1) != 0) & known
    q = tl.arange(0, RP * KP)
    q_row = (q // KP)[:, None]
    q_id = tl.where((q // KP < R) & (q % KP < K), _pairs(code, RP, JP, KP) >> 1, 1 << 29)[:, None]
    lower, earlier = q_id < id[None, :], (q_id == id[None, :]) & (q_row < row[None, :])
    in_row = (lower & (q_row == row[None, :])).to(tl.int32)
    pair = row * K + tl.sum(in_row, axis=0)  # ascending in a row
    first = known & (tl.sum(earlier.to(tl.int32), axis=0) == 0)

    # Of distinct missing experts: how many there are, and how many are lower than each.
    missed = (first & missing).to(tl.int32)
    share = tl.sum(tl.where(tl.arange(0, counts.shape[0]) == tl.sum(missed, axis=0), counts, 0), axis=0)
    on_cpu = missing & (share > 0)
    slot = tl.full((RP * JP,), -1, tl.int32)
    if share > 0:
        rank = tl.sum(lower.to(tl.int32) * _pairs(missed, RP, JP, KP)[:, None], axis=0)
        on_cpu = on_cpu & (rank < share)
        # The CPU's rows lie by (expert, row).
        before = (lower | earlier).to(tl.int32) * _pairs(on_cpu.to(tl.int32), RP, JP, KP)[:, None]
        slot = tl.where(on_cpu, tl.sum(before, axis=0), -1)
    tl.store(slots + pair, slot, mask=known)
    ours = known & (on_cpu == 0)
    first_ours = (first & ours).to(tl.int32)
    job = tl.sum(lower.to(tl.int32) * _pairs(first_ours, RP, JP, KP)[:, None], axis=0)
    tl.store(job_expert + job, id, mask=first_ours != 0)
    tl.store(job_expert + place, -1, mask=(place >= tl.sum(first_ours, axis=0)) & (place < R * K))
    tl.debug_barrier()  # the -1 of above come first
    tl.store(job_pairs + job * R + row, pair, mask=ours)
    return id, pair, known, on_cpu


@triton.jit
def _pairs(values, RP: tl.constexpr, JP: tl.constexpr, KP: tl.constexpr):
    """Of places [RP * JP] the first KP of every row: [RP * KP]; the others are not looked at."""
    rows = tl.reshape(values, (RP, JP // KP, KP))
    return tl.reshape(tl.sum(tl.where((tl.arange(0, JP // KP) == 0)[None, :, None], rows, 0), axis=1), (RP * KP,))
