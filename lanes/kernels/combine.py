"""A row's experts added up: fma over ascending expert ids, so that who computed a row changes no bit.

The pairs of a row are in ascending id already (route). A pair's y lies in VRAM, or in mapped host memory where the CPU
computed it. Letters: R rows, K experts per row, P = R * K pairs, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early
from lanes.kernels.arithmetic import fma

COLUMNS = 256  # of one program: ten programs a row of 2,560, 1 KiB of every y


def combine(
    weights: torch.Tensor, y: torch.Tensor, y_cpu: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """out fp32 [R, H] = sum over k of weights fp32 [R, K] times fp32 rows: y[p], or y_cpu[slots[p]] where slots int32
    [P] is not -1."""
    rows, chosen = weights.shape
    hidden = out.shape[1]
    grid = (triton.cdiv(hidden, COLUMNS), rows)
    _combine[grid](
        weights,
        y,
        y_cpu,
        slots,
        out,
        H=hidden,
        K=chosen,
        COLUMNS=COLUMNS,
        num_warps=2,
        enable_fp_fusion=False,
        **early.options(),
    )


@triton.jit
def _combine(
    weights, y, y_cpu, slots, out, H: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    early.behind(EARLY)
    row = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < H
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):  # unrolled: all loads in flight before the first is added
        pair = row * K + k
        slot = tl.load(slots + pair)
        a = tl.load(y + pair * H + at, mask=inside & (slot < 0), other=0.0)
        b = tl.load(y_cpu + slot * H + at, mask=inside & (slot >= 0), other=0.0)
        weight = tl.load(weights + pair) + tl.zeros((COLUMNS,), tl.float32)
        total = fma(weight, tl.where(slot >= 0, b, a), total)
    tl.store(out + row * H + at, total, mask=inside)
