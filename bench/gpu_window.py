"""A window of routed experts on a GPU without a model: random records, a cache that stays as it is, a captured graph.

On device "cpu", for tests, a replay calls the launches, by the host's clock. Not here: what is measured with it
(gpu_experts, handshake).

Letters: R rows, K experts per row.
"""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lanes.device.pin import PinnedRegion
from lanes.experts.cache import ExpertCache
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.probe import captured
from lanes.experts.gpu.share import Share
from lanes.experts.policy import Budget, Plan, State, Touched
from shared_experts import memfd
from shared_experts.layout import align
from shared_experts.manifest import ExpertsInfo

HIDDEN, INNER, CHOSEN = 2560, 640, 10
BLOCK_BYTES = 64 << 20


class Records:
    """A sealed memory of random records, mapped for reading and pinned; what a cache needs of a region."""

    def __init__(self, info: ExpertsInfo, threads: int) -> None:
        size = align(info.layers * info.experts * info.record_bytes, memfd.HUGE_PAGE_BYTES)
        memory = memfd.create(size)
        rng = np.random.default_rng(1)
        block = np.frombuffer(rng.bytes(BLOCK_BYTES + info.record_bytes), np.uint8)
        layout = info.layout
        scales = rng.uniform(0.005, 0.015, (info.record_bytes - layout.gate_up_scales) // 2).astype(np.float16)
        whole = np.frombuffer(memory.map, np.uint8)[: info.layers * info.experts * info.record_bytes]
        starts = rng.integers(0, BLOCK_BYTES, info.layers * info.experts)

        def one(layer: int, whole: npt.NDArray[np.uint8]) -> None:
            for key in range(layer * info.experts, (layer + 1) * info.experts):
                record = whole[key * info.record_bytes : (key + 1) * info.record_bytes]
                record[:] = block[starts[key] : starts[key] + info.record_bytes]
                record[layout.gate_up_scales :].view(np.float16)[:] = np.roll(scales, int(starts[key]) % len(scales))

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, range(info.layers), itertools.repeat(whole)))
        del whole
        descriptor = memfd.seal(memory)
        self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(descriptor)
        self.first = int(np.frombuffer(self._map, np.uint8, 1).ctypes.data)
        self._info = info
        self.pinned = PinnedRegion(self.first, size)

    def record_address(self, layer: int, expert: int) -> int:
        """As the device sees it."""
        address = self.pinned.device_address(
            self.first + (layer * self._info.experts + expert) * self._info.record_bytes
        )
        assert address is not None, "this GPU cannot read the region in place"
        return address


def keep(resident: npt.NDArray[np.bool_]) -> Callable[[State, Touched, Budget], tuple[State, Plan]]:
    """A policy that admits these keys at once and changes nothing afterwards."""

    def policy(state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        admit = np.flatnonzero(resident & ~state.resident)[: budget.swaps]
        now = state.resident.copy()
        now[admit] = True
        return replace(state, windows=state.windows + 1, resident=now), Plan(admit[:0], admit)

    return policy


@dataclass(frozen=True, slots=True)
class Bench:
    """What stands: experts with `kept` of each layer resident, and where chosen ids are put before a replay."""

    info: ExpertsInfo
    cache: ExpertCache
    experts: GpuExperts
    kept: int
    device: torch.device

    def ids(self, rng: np.random.Generator, rows: int, missing: float) -> torch.Tensor:
        """int32 [layers, rows, K]; of each row's K experts a share of `missing` is not resident, on average exactly."""
        chosen = self.experts.chosen
        drawn = np.empty((self.info.layers, rows, chosen), np.int32)
        owed = 0.0
        for layer in range(self.info.layers):
            for row in range(rows):
                owed += missing * chosen
                misses, owed = int(owed), owed - int(owed)
                absent = self.kept + rng.permutation(self.info.experts - self.kept)[:misses]
                present = rng.permutation(self.kept)[: chosen - misses]
                drawn[layer, row] = np.sort(np.concatenate((present, absent)))
        return torch.from_numpy(drawn).to(self.device)


class Window:
    """A captured window of every layer; `milliseconds` of one replay by the GPU's clock."""

    def __init__(self, bench: Bench, rows: int, share: Share | None) -> None:
        self._bench, self._rows, self._share = bench, rows, share
        layers, device = bench.info.layers, bench.device
        generator = torch.Generator(device).manual_seed(5)
        self._x = torch.randn(layers, rows, bench.info.hidden, generator=generator, device=device)
        self._weights = torch.rand(layers, rows, bench.experts.chosen, generator=generator, device=device)
        self._ids = bench.ids(np.random.default_rng(0), rows, 0.0)
        self.out = torch.zeros_like(self._x)

        def window() -> None:
            bench.experts.attach(share)
            for layer in range(layers):
                bench.experts.launch(layer, self._x[layer], self._ids[layer], self._weights[layer], self.out[layer])

        self._captured = captured(window, device)
        self._replay = self._captured.__enter__()
        bench.experts.discard_window()

    def milliseconds(self, ids: torch.Tensor) -> float:
        """One window over these ids, begun and ended as a lane does."""
        bench = self._bench
        bench.experts.attach(self._share)
        self._ids.copy_(ids)
        if on_gpu := bench.device.type == "cuda":
            torch.cuda.synchronize()
        bench.experts.begin_window(self._rows)
        took = _on_gpu(self._replay) if on_gpu else _here(self._replay)
        bench.experts.end_window()
        return took


def _on_gpu(replay: Callable[[], None]) -> float:
    """Milliseconds by its clock."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    replay()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended))


def _here(replay: Callable[[], None]) -> float:
    began_ns = time.perf_counter_ns()
    replay()
    return (time.perf_counter_ns() - began_ns) / 1e6


def medians(runs: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Of interleaved rounds, the first three not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(3 + rounds):
        for name, run in runs.items():
            took = run(number)
            if number >= 3:
                times[name].append(took)
    return {name: statistics.median(taken) for name, taken in times.items()}
