"""What the CPU's answers add to a decode window of a GPU lane: the part of a step's bound that no memory's rate gives.

One row through the routed experts of every decoder layer, all of them in VRAM, by the lane's own launches in a captured
graph: with the CPU's share (row and ids are handed over, the doorbell is rung, its thread answers that none is its own,
the answer is awaited) and without. Replayed by turns; the handshake is what the one takes longer than the other, by
medians. So it is what waiting for an empty answer adds to a layer whose experts are resident: they are computed
meanwhile, in both graphs, and a bound that also counts their bytes counts no time twice. Nothing else could hide the
wait: what the next layer needs is behind it. A layer with misses waits for the later of link and CPU, whose bytes the
bound counts, and for one such answer.

Not here: rates of memories (ceilings). Invariant: a lane's start compiles the same kernels for its own probe, and only
the records that are used here are registered with the driver.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.gpu_window import Bench, Window, keep, medians
from lanes.counters import Counters
from lanes.device.pin import PinnedRegion
from lanes.experts.cache import ExpertCache, Region
from lanes.experts.gpu import probe
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.share import Share
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.native import ExpertKernel
from lanes.experts.policy import Touched
from lanes.experts.slots import Slots
from shared_experts.attach import AttachedRegion
from shared_experts.layout import align
from shared_experts.manifest import ExpertsInfo
from shared_experts.memfd import HUGE_PAGE_BYTES

ROUNDS = 200  # of both


class First:
    """The first records of a region, as many as `info` says, seen as a region of that shape by whoever reads slots."""

    def __init__(self, region: AttachedRegion, info: ExpertsInfo, device: torch.device) -> None:
        self._info = info
        self._pinned: PinnedRegion | None = None
        self.home = region.records_address  # in this process
        if device.type == "cuda":
            end = self.home + info.layers * info.experts * info.record_bytes - region.base_address
            size_bytes = min(align(end, HUGE_PAGE_BYTES), region.mapped_bytes)
            self._pinned = PinnedRegion(region.base_address, size_bytes)

    def record_address(self, layer: int, expert: int) -> int:
        """Where the device reads the record of an expert."""
        here = self.home + (layer * self._info.experts + expert) * self._info.record_bytes
        if self._pinned is None:
            return here
        found = self._pinned.device_address(here)
        assert found is not None, "this GPU cannot read the region in place"
        return found

    def close(self) -> None:
        """The driver lets go of them."""
        if self._pinned is not None:
            self._pinned.close()


def measure(
    region: AttachedRegion, info: ExpertsInfo, chosen: int, kernel: ExpertKernel, device: torch.device,
    core: int | None = None, rounds: int = ROUNDS,
) -> dict[str, Any]:  # fmt: skip
    """Of a window of the pack's decoder layers; `kernel` and `core` are those of the lane's share.

    Raises StartError where no doorbell works.
    """
    layers = info.layers - info.draft_layers
    info = replace(info, layers=layers, draft_layers=0, experts=chosen)  # each layer's are used by every window
    records, refused = First(region, info, device), dict[str, str]()
    try:
        slots = DeviceSlots(layers * chosen, info.record_bytes, device) if device.type == "cuda" else None
        experts, cache, counters = resident(records, info, chosen, device, slots)
        home = np.uint64(records.home) + np.arange(layers * chosen, dtype=np.uint64) * np.uint64(info.record_bytes)

        def make() -> Share:
            return Share(kernel, home.reshape(layers, chosen), chosen, device, core=core)

        share = probe.attach(experts, make, refused.__setitem__)
        try:
            share.split(0 * share.most)
            bench = Bench(info, cache, experts, chosen, device)
            fill(cache, experts, device)
            times = compared(bench, share, rounds)
        finally:
            share.close()
    finally:
        records.close()
    assert counters.expert_misses == 0, "all experts were to be resident"
    added = max(0.0, times["answered"] - times["alone"])
    return {
        "milliseconds": {"handshake": round(added, 4), **{name: round(took, 4) for name, took in times.items()}},
        "us_a_layer": round(added * 1e3 / layers, 2), "layers": layers, "rounds": rounds,
        "doorbell": share.doorbell.name, "refused": refused,
    }  # fmt: skip


def resident(
    records: Region, info: ExpertsInfo, chosen: int, device: torch.device, slots: Slots | None
) -> tuple[GpuExperts, ExpertCache, Counters]:
    """Experts and a cache with room for every record, which it asks for in its first window."""
    counters, keys = Counters(), info.layers * info.experts
    budget = keys * info.record_bytes
    cache = ExpertCache(records, info, budget, keep(np.ones(keys, np.bool_)), counters, slots, swap_bytes=budget)
    return GpuExperts(cache, info, chosen, counters, device), cache, counters


def fill(cache: ExpertCache, experts: GpuExperts, device: torch.device) -> None:
    """Every record comes into its slot."""
    nothing = np.empty(0, np.int64)
    cache.turn(Touched(nothing, nothing, 1))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    experts.end_window()
    assert cache.resident.all(), "the cache is not as it should be"


def compared(bench: Bench, share: Share, rounds: int) -> dict[str, float]:
    """Medians of milliseconds of the window that is `answered`, and `alone`."""
    alone, answered = Window(bench, 1, None), Window(bench, 1, share)
    ids = bench.ids(np.random.default_rng(17), 1, 0.0)
    found = medians(
        {"alone": lambda _: alone.milliseconds(ids), "answered": lambda _: answered.milliseconds(ids)}, rounds
    )  # fmt: skip
    assert torch.equal(alone.out, answered.out), "one of the two windows is wrong"
    return found
