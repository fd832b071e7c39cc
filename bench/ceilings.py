"""What this host's memories deliver, measured with the lanes' own records: the rates that a bound is made of.

    cpu_read           the lanes' cores read experts where they lie                 (a CPU lane's dense weights, too)
    hbm_copy           a copy within the GPU's memory, bytes read plus bytes written
    link               copies from pinned host memory to the GPU, alone
    link_beside_cpu    the same while the cores read, and what the cores then get (cpu_beside_link)

Not here: what is made of them (`bound`). Invariant: a rate that was not measured is absent, never assumed.
"""

from __future__ import annotations

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

READ_BYTES = 64 << 20  # of a round
ROUNDS = 15
DEVICE_BYTES = 256 << 20
COPIES = 8  # of a round


def measure(region: AttachedRegion, kernel: ExpertKernel, device: str) -> Ceilings:
    """Takes some seconds; the device's part needs half a GiB of its memory."""
    read = _Reader(region, kernel)
    alone = read.rate(lambda done: done >= ROUNDS)
    if device == "cpu":
        return Ceilings(alone)
    gpu = torch.device(device)
    here, there = (torch.empty(DEVICE_BYTES, dtype=torch.uint8, device=gpu) for _ in range(2))
    host = torch.empty(DEVICE_BYTES, dtype=torch.uint8, pin_memory=True)
    hbm = 2 * _copy_rate(here, there)
    link = _copy_rate(here, host)
    stop, beside = threading.Event(), list[float]()
    reader = threading.Thread(target=lambda: beside.append(read.rate(lambda done: stop.is_set())))
    reader.start()
    link_beside = _copy_rate(here, host)
    stop.set()
    reader.join()
    return Ceilings(alone, hbm, link, link_beside, beside[0])


class _Reader:
    """Walks through all records of a region with a kernel's threads."""

    def __init__(self, region: AttachedRegion, kernel: ExpertKernel) -> None:
        header = region.header
        records = header.layers * header.experts
        self._every: npt.NDArray[np.uint64] = np.uint64(region.records_address) + np.arange(
            records, dtype=np.uint64
        ) * np.uint64(header.record_bytes)
        self._count = min(records, max(1, READ_BYTES // header.record_bytes))
        self._kernel, self._record_bytes, self._at = kernel, header.record_bytes, 0

    def rate(self, stopped: Callable[[int], bool]) -> float:
        """The median of rounds until `stopped(rounds done)`, at least one."""
        rates: list[float] = []
        while not rates or not stopped(len(rates)):
            records = self._every[(self._at + np.arange(self._count)) % len(self._every)]
            self._at += self._count
            began_s = time.perf_counter()
            self._kernel.read(records)
            rates.append(self._count * self._record_bytes / (time.perf_counter() - began_s))
        return statistics.median(rates)


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
