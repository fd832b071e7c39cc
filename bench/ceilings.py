"""What this host's memories deliver, measured with the lanes' own records: the rates that a bound is made of.

    cpu_read           the kernel's threads read experts where they lie             (a CPU lane's dense weights, too)
    hbm_copy           a copy within the GPU's memory, bytes read plus bytes written
    link               copies from pinned host memory to the GPU, alone
    link_beside_cpu    the same while the kernel reads, and what that then gets (cpu_beside_link)

What is read was read before: a page's first touch in a process is a fault, which a lane has behind it (its region is
pinned). A round is long beside what starting it takes, and all of them together are far larger than any cache.
Not here: what is made of them (`bound`). Invariant: a rate that was not measured is absent, never assumed.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from bench.bound import Ceilings
from lanes.experts.native import ExpertKernel
from shared_experts.attach import AttachedRegion

READ_BYTES = 256 << 20  # of a round
TOUCHED_BYTES = 8 << 30  # read once before, then again and again in that order
ROUNDS = 15
DEVICE_BYTES = 256 << 20
COPIES = 8  # of a round


def measure(region: AttachedRegion, kernel: ExpertKernel, device: str, core: int | None = None) -> Ceilings:
    """Takes some seconds; the device's part needs half a GiB of its memory.

    `kernel` is called from a thread on `core`; beside a device it has the cores of a lane's share, and the calling
    thread, which waits for the device, stays off them.
    """
    read = _Reader(region, kernel, core)
    alone = read.beside(lambda: None)
    if device == "cpu":
        return Ceilings(alone)
    gpu = torch.device(device)
    here, there = (torch.empty(DEVICE_BYTES, dtype=torch.uint8, device=gpu) for _ in range(2))
    host = torch.empty(DEVICE_BYTES, dtype=torch.uint8, pin_memory=True)
    hbm = 2 * _copy_rate(here, there)
    link, beside = _copy_rate(here, host), list[float]()
    cpu_beside = read.beside(lambda: beside.append(_copy_rate(here, host)))
    return Ceilings(alone, hbm, link, beside[0], cpu_beside)


class _Reader:
    """Reads records of a region, far apart as a window's are, with a kernel's threads."""

    def __init__(self, region: AttachedRegion, kernel: ExpertKernel, core: int | None) -> None:
        header = region.header
        order = np.random.default_rng(5).permutation(header.layers * header.experts).astype(np.uint64)
        addresses = np.uint64(region.records_address) + order * np.uint64(header.record_bytes)
        self._records: npt.NDArray[np.uint64] = addresses[: max(1, TOUCHED_BYTES // header.record_bytes)]
        self._count = min(len(self._records), max(1, READ_BYTES // header.record_bytes))
        self._kernel, self._record_bytes, self._core, self._at = kernel, header.record_bytes, core, 0
        kernel.read(self._records)

    def beside(self, work: Callable[[], None]) -> float:
        """The median rate of rounds while `work` runs in the calling thread, of ROUNDS rounds at least."""
        done, rates = threading.Event(), list[float]()

        def rounds() -> None:
            if self._core is not None:
                os.sched_setaffinity(threading.get_native_id(), {self._core})
            while len(rates) < ROUNDS or not done.is_set():
                rates.append(self._round())

        reader = threading.Thread(target=rounds, name="ceilings")
        reader.start()
        try:
            work()
        finally:
            done.set()
            reader.join()
        return statistics.median(rates)

    def _round(self) -> float:
        records = self._records[(self._at + np.arange(self._count)) % len(self._records)]
        self._at += self._count
        began_s = time.perf_counter()
        self._kernel.read(records)
        return self._count * self._record_bytes / (time.perf_counter() - began_s)


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """The median of rounds, by the device's clock."""
    rates: list[float] = []
    for number in range(1 + ROUNDS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(COPIES):
            target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        if number:  # the first one warms up
            rates.append(COPIES * target.numel() / (began.elapsed_time(ended) / 1e3))
    return statistics.median(rates)
