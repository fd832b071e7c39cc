"""Starts the CPU's share of a GPU lane: finds a doorbell that works, measures both sides at once, sets the split.

Not here: when (once, after the tables and before windows are captured) and what is logged (the lane).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from lanes.experts.cache import ExpertCache
from lanes.experts.gpu import probe, rates
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.share import Share
from lanes.experts.native import ExpertKernel

_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Started:
    """What stands, and what was found."""

    share: Share
    rates: rates.Rates


def start_share(
    experts: GpuExperts,
    cache: ExpertCache,
    kernel: ExpertKernel,
    first_record: int,
    on_refused: Callable[[str, str], None],
    core: int | None = None,
    measuring: AbstractContextManager[object] = _NOTHING,
    copy_us: float = math.inf,
) -> Started:
    """Attaches a share to `experts`; StartError where no doorbell works.

    `first_record` is the address of record (0, 0) in this process. `kernel` works for nobody else while a window is
    open; the share's thread, pinned to `core`, is its calling thread. Close the share before the kernel. Rates are
    measured inside `measuring`. `copy_us`: what a copy of a record took the link.
    """
    layers, each = cache.addresses.shape
    home = np.uint64(first_record) + np.arange(layers * each, dtype=np.uint64) * np.uint64(cache.record_bytes)

    def make() -> Share:
        return Share(
            kernel, home.reshape(layers, each), experts.chosen, experts.device, core=core
        )  # fmt: skip

    share = probe.attach(experts, make, on_refused)
    with measuring:
        measured = rates.measure(kernel, home, cache.home, experts.chosen, experts.device, core)
    share.search(measured, copy_us)
    return Started(share, measured)


def cores_of(cores: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """(the engine's core, those of the share and its pool, the share's thread first) of a lane's cores."""
    return cores[0], tuple(cores[1:]) or tuple(cores)
