"""What a missing expert costs the link and what it costs the CPU, measured while both work, as they do in a window.

Not here: the split that follows from it (lanes.experts.split). Alone, either side is faster: both read the same memory.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lanes.experts.gpu.workspace import Workspace
from lanes.experts.native import ExpertKernel
from lanes.kernels import experts
from shared_experts.layout import RecordLayout

WARM_UP = 3  # layers


@dataclass(frozen=True, slots=True)
class Rates:
    """Microseconds of one expert of one row; `start` is what a layer's share costs the CPU before its first expert."""

    link_us: float
    cpu_us: float
    cpu_start_us: float
    link_alone_us: float
    cpu_alone_us: float


def measure(
    kernel: ExpertKernel,
    home: npt.NDArray[np.uint64],  # [N] records of the region in this process
    on_device: npt.NDArray[np.uint64],  # [N] the same as the device sees them
    chosen: int,
    device: torch.device,
    core: int | None = None,
    layers: int = 200,
) -> Rates:
    """Reads records far apart, `layers` times `chosen` of them by the link; takes about 0.3 s at the true size.

    While the link works, `kernel` is called from a thread on `core`.
    """
    link, cpu = _Link(kernel.layout, on_device, chosen, device), _Cpu(kernel, home, chosen)
    fewer = max(1, layers // 4)
    link.run(WARM_UP)
    link_alone_us = link.run(fewer)
    one_us, all_us = cpu.median_us(1, fewer), cpu.median_us(chosen, fewer)
    cpu_alone_us = max(0.0, all_us - one_us) / max(1, chosen - 1)
    start_us = max(0.0, one_us - cpu_alone_us)

    stop, beside = threading.Event(), list[float]()
    side = threading.Thread(target=lambda: beside.append(cpu.until(stop, core)), name="expert-rates")
    side.start()
    link_us = link.run(layers)
    stop.set()
    side.join()
    return Rates(link_us, max(0.0, beside[0] - start_us / chosen), start_us, link_alone_us, cpu_alone_us)


class _Link:
    """Layers of missing experts, computed by the GPU."""

    def __init__(
        self, layout: RecordLayout, addresses: npt.NDArray[np.uint64], chosen: int, device: torch.device
    ) -> None:
        self._layout, self._chosen, self._device = layout, chosen, device
        self._work = Workspace.of(layout, 1, chosen, device)
        self._work.jobs.pairs.copy_(torch.arange(chosen, dtype=torch.int32).reshape(-1, 1))
        table = torch.from_numpy(addresses.view(np.int64)).to(device)
        rng = np.random.default_rng(3)
        self._jobs = torch.from_numpy(rng.integers(0, len(addresses), (64, chosen)).astype(np.int32)).to(device)
        self._table = table

    def run(self, layers: int) -> float:
        """Microseconds of an expert."""
        self._finish()
        began_s = time.perf_counter()
        for n in range(layers):
            self._work.jobs.expert.copy_(self._jobs[n % len(self._jobs)])
            experts.gate_up(self._layout, self._table, self._work.jobs, self._work.x, self._work.h)
            experts.down(self._layout, self._table, self._work.jobs, self._work.h, self._work.y)
        self._finish()
        return (time.perf_counter() - began_s) * 1e6 / layers / self._chosen

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Cpu:
    """Layers of missing experts, computed in place."""

    def __init__(self, kernel: ExpertKernel, home: npt.NDArray[np.uint64], chosen: int) -> None:
        self._kernel, self._home, self._chosen = kernel, home, chosen
        self._rng = np.random.default_rng(4)
        self._x = self._rng.standard_normal((1, kernel.layout.hidden)).astype(np.float32)
        self._out = np.empty((chosen, kernel.layout.hidden), np.float32)

    def median_us(self, count: int, layers: int) -> float:
        """Of a layer of `count` experts."""
        times = [self._layer(count) for _ in range(WARM_UP + layers)]
        return float(np.median(times[WARM_UP:]))

    def until(self, stop: threading.Event, core: int | None) -> float:
        """Microseconds of an expert, of full layers until `stop`, at least one."""
        if core is not None:
            os.sched_setaffinity(threading.get_native_id(), {core})
        times = [self._layer(self._chosen)]
        while not stop.is_set():
            times.append(self._layer(self._chosen))
        return float(np.mean(times)) / self._chosen

    def _layer(self, count: int) -> float:
        records = self._rng.choice(self._home, count)
        offsets = np.arange(count + 1, dtype=np.int32)
        began_s = time.perf_counter()
        self._kernel.run(records, offsets, np.zeros(count, np.int32), self._x, self._out[:count])
        return (time.perf_counter() - began_s) * 1e6
