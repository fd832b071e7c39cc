"""Launches that begin while the one in front of them ends, on devices that can (compute capability 9.0 on).

A kernel says `behind` in every program, before it touches what the launch in front reads or writes: from there on all
earlier launches have ended, and the next one may begin (to say it again waits for nothing). What it loads before that,
weights that nobody changes, comes while the launch in front still runs.

Where what follows reads before its own `behind` only what no launch of a window writes, a kernel says `open_next` at
its start: the next one may then begin before this one's turn has come. That is so in front of products and of lower and
lift, whose weights come meanwhile (measured: elsewhere it costs time), and of down, whose records cross the link behind
gate-up's without a gap. `ahead` sends for a product's rows at once.

It pays: 14 % of a layer's time with one row on an H200 (bench.gpu_kernels measures both ways). Invariants: nothing is
written before `behind` (delta_step counts there who has read, in a place that only it knows); what reads there results
of launches further in front (down, leave, delta_step) stands behind a launch that opens nothing (between gate-up and
down is quantise, which opens, and no program of which begins before all of gate-up has seen the end of routing); a
kernel launched with these options says `behind` in every program, so that waiting for the launch in front is waiting
for all.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)
ENABLED = True


@cache
def _able() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= LEAST_CAPABILITY


def options() -> dict[str, Any]:
    """Arguments of a launch whose kernel says `behind(EARLY)`."""
    early = ENABLED and not triton.knobs.runtime.interpret and _able()
    return {"EARLY": early, "launch_pdl": early}


@triton.jit
def open_next(EARLY: tl.constexpr):
    """The next launch may begin: before its own `behind` it reads nothing that a launch of the window writes."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def ahead(matrix, n, ROWS: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr):
    """Rows n of a matrix [ROWS, D] begin to come to the L2 cache, on the devices of `options`."""
    BYTES: tl.constexpr = D * (matrix.dtype.element_ty.primitive_bitwidth // 8)
    if EARLY and BYTES % 16 == 0:
        N: tl.constexpr = n.shape[0]
        at = (matrix.to(tl.int64) + n.to(tl.int64) * BYTES) & -16
        size = tl.where(n < ROWS, BYTES, 0)
        # A thread a row: what is smaller than a program lies in its first threads, and once more in others.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3; setp.ne.and.u32 p, $2, 0, p;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r", [at, size, tl.full((N,), N, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def behind(EARLY: tl.constexpr):
    """All earlier launches have ended, and what they wrote is seen; the next one may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
