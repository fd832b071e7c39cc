"""What a missing expert costs the link and what it costs the CPU, measured while both work, as they do in a window.

Not here: the split that follows from it (lanes.experts.split). Alone, either side is faster: both read the same memory.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lanes.experts.cpu_line import Line
from lanes.experts.gpu.workspace import Workspace
from lanes.experts.native import ExpertKernel
from lanes.kernels import experts
from shared_experts.layout import RecordLayout

WARM_UP = 3  # layers
BESIDE = 2 / 3
DRAWN = 512  # layers of records, drawn before anything is timed


@dataclass(frozen=True, slots=True)
class Rates:
    """Microseconds of one expert of one row; `start` is what a layer's share costs the CPU before its first expert."""

    link_us: float
    cpu_us: float
    cpu_start_us: float
    link_alone_us: float
    cpu_alone_us: float


def copy_misses(copy_us: float, rates: Rates) -> float:
    """What a copy of a record into the cache costs a window, in misses that link and CPU share.

    A third of the copies' time is time that the link would have had nothing to do: the rest is BESIDE. Never less than
    one, which is what a copy costs where misses have the link alone.
    """
    miss_us = 1 / (1 / rates.link_us + 1 / max(rates.cpu_us, 1e-3))
    return max(1.0, BESIDE * copy_us / miss_us)


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
    link, cpu = _Link(kernel.layout, on_device, chosen, device), CpuTimes(kernel, home, chosen)
    fewer = max(1, layers // 4)
    link.run(WARM_UP)
    link_alone_us = link.run(fewer)
    alone = cpu.measured(lambda rounds: rounds >= fewer)

    stop, beside = threading.Event(), list[Line]()

    def compute() -> None:
        if core is not None:
            os.sched_setaffinity(threading.get_native_id(), {core})
        beside.append(cpu.measured(lambda rounds: stop.is_set()))

    side = threading.Thread(target=compute, name="expert-rates")
    side.start()
    link_us = link.run(layers)
    stop.set()
    side.join()
    return Rates(link_us, beside[0].each_us, beside[0].start_us, link_alone_us, alone.each_us)


def line_of(one_us: float, all_us: float, count: int) -> Line:
    """Through the times of a layer of one expert and of `count`: neither part is below nothing, and one is met."""
    each_us = min(max(0.0, all_us - one_us) / (count - 1), one_us) if count > 1 else one_us
    return Line(one_us - each_us, each_us)


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
            experts.quantise_rows(self._work.h, self._work.quantised, self._layout.format.group, opens=True)
            experts.down(self._layout, self._table, self._work.jobs, self._work.quantised, self._work.y)
        self._finish()
        return (time.perf_counter() - began_s) * 1e6 / layers / self._chosen

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class CpuTimes:
    """Layers of missing experts, computed in place as a share's thread has it: calls follow each other so closely that
    the pool's workers do not go to sleep, and nothing but the call is timed."""

    def __init__(self, kernel: ExpertKernel, home: npt.NDArray[np.uint64], chosen: int) -> None:
        rng, hidden = np.random.default_rng(4), kernel.layout.hidden
        self._native, self._chosen = kernel.native(), chosen
        self._records = [rng.choice(home, chosen) for _ in range(DRAWN)]
        self._given = (
            np.arange(chosen + 1, dtype=np.int32), np.zeros(chosen, np.int32),
            rng.standard_normal((1, hidden), np.float32), np.empty((chosen, hidden), np.float32),
        )  # fmt: skip
        offsets, index, x, out = (array.ctypes.data for array in self._given)
        layout = ctypes.byref(self._native.layout)

        def run(count: int, records: int) -> int:
            code: int = self._native.library.expert_run(
                self._native.pool, layout, count, records, offsets, index, 1, x, out
            )
            return code

        self._run = run

    def measured(self, stopped: Callable[[int], bool]) -> Line:
        """Of layers of one expert and of `chosen` by turns, until `stopped(rounds)`; of one round at least."""
        times: tuple[tuple[int, list[float]], ...] = ((1, []), (self._chosen, []))
        rounds = -WARM_UP
        while rounds < 1 or not stopped(rounds):
            for number, (count, seen) in enumerate(times):
                # Far from what was read just before: nothing is found in a cache.
                records = self._records[(2 * rounds + number) % DRAWN].ctypes.data
                began_s = time.perf_counter()
                code = self._run(count, records)
                if rounds >= 0:
                    seen.append((time.perf_counter() - began_s) * 1e6)
                self._native.check(code)
            rounds += 1
        one_us, all_us = (statistics.median(seen) for _, seen in times)
        return line_of(one_us, all_us, self._chosen)
