"""Launches that begin while the one in front of them ends, on devices that can (compute capability 9.0 on).

A kernel says `behind` once, in every program, before it touches what the launch in front reads or writes: from there on
all earlier launches have ended, and the next one may begin. What it loads before that, weights that nobody changes,
comes while the launch in front still runs.

It pays: 14 % of a layer's time with one row on an H200 (bench.gpu_kernels measures both ways). Invariants: nothing is
written before `behind`; a kernel launched with these options says it in every program, so that waiting for the launch
in front is waiting for all.
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
def behind(EARLY: tl.constexpr):
    """All earlier launches have ended, and what they wrote is seen; the next one may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
