"""Routed experts through the GPU's kernels beside the CPU's store, on the same records: made for either device."""

from __future__ import annotations

import numpy as np
import torch

from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache, slots_of
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.native import ExpertKernel
from lanes.experts.store import ExpertStore
from tests.fakes.records import FakeRegion


class Rig:
    """Both, with a cache of `slots` records each; on a GPU the records are pinned."""

    def __init__(
        self, device: str = "cpu", slots: int = 0, policy=adaptive, *, format: str = "q4g32", hidden: int = 64,
        inner: int = 32, layers: int = 3, experts: int = 12, chosen: int = 3,
    ) -> None:  # fmt: skip
        self.device, self.chosen = device, chosen
        self.region = FakeRegion(format, hidden, inner, layers, experts)
        info = self.region.info
        budget = slots * info.record_bytes
        self.counters, self.host_counters = Counters(), Counters()
        memory = None
        if device == "cuda":
            self.region.pin()
            memory = DeviceSlots(slots_of(info, budget), info.record_bytes, torch.device(device))
        self.cache = ExpertCache(self.region, info, budget, policy, self.counters, memory, swap_bytes=budget)
        self.experts = GpuExperts(self.cache, info, chosen, self.counters, device)
        self.kernel = ExpertKernel(self.region.layout, threads=1)
        self.store = ExpertStore(
            self.kernel, ExpertCache(self.region, info, 0, policy, self.host_counters), self.host_counters
        )

    def choices(self, rng: np.random.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, ids, weights) on the host."""
        info = self.region.info
        ids = np.stack([np.sort(rng.permutation(info.experts)[: self.chosen]) for _ in range(rows)])
        x = rng.standard_normal((rows, info.hidden)).astype(np.float32)
        weights = rng.uniform(size=ids.shape).astype(np.float32)
        return torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)

    def window(self, seed: int, rows: int, layers: int | None = None) -> None:
        """One window through both; every bit of every layer's sum is compared."""
        rng = np.random.default_rng(seed)
        found, wanted = [], []
        for layer in range(layers or self.region.info.layers):
            x, ids, weights = self.choices(rng, rows)
            found.append(self.experts.forward(layer, *(t.to(self.device) for t in (x, ids, weights))))
            wanted.append(self.store.forward(layer, x, ids, weights))
        got = torch.stack(found).cpu()
        assert torch.equal(got, torch.stack(wanted)), f"{(got != torch.stack(wanted)).sum()} differ"
        self.experts.end_window()
        self.store.end_window()
