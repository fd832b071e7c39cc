"""What later launches read, on its way to the L2 cache while a layer waits for experts that miss.

Memory has nothing to do then: link and CPU bring what is missing. Programs of the experts' gate-up send for it, and
only where something misses: elsewhere it would take memory from the experts that are there (6 % of a layer on an H200).
Not here: which bytes (lanes.models.qwen4_exp.gpu.ahead). Without launches that begin early, nothing is sent for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LINES = 3  # of programs of gate-up, as many in each as a job has


@dataclass(frozen=True, slots=True)
class Ahead:
    """Of a window of one row: pieces int64 [N, 2] (address, bytes; multiples of 16), and int8 [E], which experts do not
    miss."""

    plan: torch.Tensor
    resident: torch.Tensor


@triton.jit
def send(plan, pieces, experts, resident, program, programs, K: tl.constexpr, JP: tl.constexpr, EARLY: tl.constexpr):
    """Sends for a program's part of a plan's pieces where one of experts int32 [K], -1 for the CPU's, misses."""
    if EARLY:
        j = tl.arange(0, JP)
        expert = tl.load(experts + j, mask=j < K, other=-2)
        here = tl.load(resident + expert, mask=expert >= 0, other=1)
        if tl.max(((expert == -1) | (here == 0)).to(tl.int32), axis=0) != 0:
            lane = tl.arange(0, 32)
            for first in range(program * 32, pieces, programs * 32):
                inside = first + lane < pieces
                at = plan + 2 * (first + lane)
                address = tl.load(at, mask=inside, other=0)
                size = tl.load(at + 1, mask=inside, other=0).to(tl.int32)
                # A thread a piece: what is smaller than a program lies in its first threads, and once more in others.
                tl.inline_asm_elementwise(
                    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, 32; setp.ne.and.u32 p, $2, 0, p;"
                    " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                    "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
