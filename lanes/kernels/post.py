"""A layer's activations, quantised for the GPU's experts and, in the same launch, handed to the host. Windows that
route do it in the launch that routes (lanes.kernels.route).

The host gets the ids that were chosen and whose they are (a log that counts and cache policy are made of) and, where
the CPU takes a share of the misses, all that its thread needs (the block drawn in lanes/native/share.h). Not here: the
doorbell, to be rung after this launch.

Letters: R rows (1..4), K experts per row, H hidden, G group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.experts import quantise_groups
from lanes.kernels.rows import QuantisedRows


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of the CPU's share, in mapped host memory: head int32 [2] (layer, rows), ids int32 [P], x fp32 [R, H]."""

    head: torch.Tensor
    ids: torch.Tensor
    x: torch.Tensor


@dataclass(frozen=True, slots=True)
class Post:
    """For a launch that posts what it chooses: the arguments of `post` that it does not fill itself."""

    x: torch.Tensor
    rows: QuantisedRows
    group: int
    log: torch.Tensor
    layer: int
    inputs: Inputs | None


def post(
    x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, rows: QuantisedRows, group: int, log: torch.Tensor,
    layer: int, inputs: Inputs | None,
) -> None:  # fmt: skip
    """Fills `rows` from x fp32 [R, H]. ids int32 [R, K] go to `inputs`, marked by slots int32 [P] (lanes.experts.split,
    `marked`), and to log int32 [at least R, K]: 2 * id + 1 of the CPU's own, else 2 * id."""
    count, hidden = x.shape
    groups = hidden // group
    none = log
    head, to_ids, to_x = (none, none, none) if inputs is None else (inputs.head, inputs.ids, inputs.x)
    _post[(triton.cdiv(groups, 8), count)](
        x, ids, slots, rows.q, rows.scale, rows.correction, log, head, to_ids, to_x, layer, GROUPS=groups, G=group,
        K=ids.shape[1], KP=triton.next_power_of_2(ids.shape[1]), SHARED=inputs is not None, num_warps=4,
        enable_fp_fusion=False, **early.options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _post(
    x, ids, slots, q, scale, correction, log, head, to_ids, to_x, layer, GROUPS: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    row = tl.program_id(1)
    values, at, inside = quantise_groups(x, q, scale, correction, tl.program_id(0), row, GROUPS, G)
    if SHARED:
        tl.store(to_x + row * (GROUPS * G) + at, values, mask=inside)
    if tl.program_id(0) == 0:
        k = tl.arange(0, KP)
        id = tl.load(ids + row * K + k, mask=k < K, other=0)
        cpu = tl.load(slots + row * K + k, mask=k < K, other=-1) >= 0
        tl.store(log + row * K + k, 2 * id + cpu.to(tl.int32), mask=k < K)
        if SHARED:
            tl.store(to_ids + row * K + k, tl.where(cpu, id, -1 - id), mask=k < K)
            if row == 0:
                tl.store(head, layer)
                tl.store(head + 1, tl.num_programs(1))
