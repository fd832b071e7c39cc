"""Routed experts through the GPU's kernels beside the CPU's store, on the same records: made for either device."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from lanes.counters import Counters
from lanes.device.pin import PinnedRegion
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache, Region, slots_of
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.probe import captured
from lanes.experts.gpu.share import Share
from lanes.experts.gpu.slots import DeviceSlots
from lanes.experts.native import ExpertKernel
from lanes.experts.slots import Slots
from lanes.experts.store import ExpertStore
from tests.fakes.records import FakeRegion


class Pinned:
    """A region as the GPU sees it."""

    def __init__(self, region: FakeRegion) -> None:
        info, self._region = region.info, region
        self._pinned = PinnedRegion(region.record_address(0, 0), info.layers * info.experts * info.record_bytes)
        # Before the memory goes: what comes to lie there later could not be registered.
        weakref.finalize(region, self._pinned.close)

    def record_address(self, layer: int, expert: int) -> int:
        address = self._pinned.device_address(self._region.record_address(layer, expert))
        assert address is not None
        return address


class Rig:
    """Both, with a cache of `slots` records each; on a GPU the records are pinned."""

    def __init__(
        self, device: str = "cpu", slots: int = 0, policy=adaptive, *, format: str = "q4g32", hidden: int = 64,
        inner: int = 32, layers: int = 3, experts: int = 12, chosen: int = 3, spare: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.chosen = device, chosen
        self.region = FakeRegion(format, hidden, inner, layers, experts)
        info = self.region.info
        budget = slots * info.record_bytes
        self.counters, self.host_counters = Counters(), Counters()
        memory: Slots | None = None
        seen: Region = self.region
        if device == "cuda":
            seen = Pinned(self.region)
            memory = DeviceSlots(slots_of(info, budget), info.record_bytes, torch.device(device), spare)
        self.cache = ExpertCache(seen, info, budget, policy, self.counters, memory, swap_bytes=budget)
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

    def share(self, counts: np.ndarray | None = None, **options) -> Share:
        """Attaches the CPU's share; without `counts` it takes every miss."""
        info = self.region.info
        home = np.array([[self.region.record_address(n, e) for e in range(info.experts)] for n in range(info.layers)])
        share = Share(
            ExpertKernel(self.region.layout, threads=2), home.astype(np.uint64), self.chosen, torch.device(self.device),
            **options,
        )  # fmt: skip
        share.split(np.arange(len(share.counts), dtype=np.int32) if counts is None else counts)
        self.experts.attach(share)
        return share

    def shared_window(self, seed: int, rows: int, *, thinking: bool = False) -> None:
        """A decode window with the CPU's share, launched layer by layer; with `thinking` the table moves on meanwhile,
        as soon as the window has read it."""
        rng = np.random.default_rng(seed)
        self.experts.begin_window(rows)
        if thinking:
            before = self.cache.version
            self.experts.think()
            assert self.cache.version == before, "the window has not read the table"
        found, wanted = [], []
        for layer in range(self.region.info.layers - self.region.info.draft_layers):
            x, ids, weights = self.choices(rng, rows)
            out = torch.empty_like(x, device=self.device)
            given = (x, ids.to(torch.int32), weights)
            self.experts.launch(layer, *(t.to(self.device) for t in given), out)
            found.append(out)
            wanted.append(self.store.forward(layer, x, ids, weights))
            if thinking:
                self.experts.think()
        got = torch.stack(found).cpu()
        self.experts.end_window()
        if not thinking:
            self.experts.settle()
        assert torch.equal(got, torch.stack(wanted)), f"{(got != torch.stack(wanted)).sum()} differ"
        self.store.end_window()

    def window(self, seed: int, rows: int, layers: int | None = None, *, prompt: bool = False) -> None:
        """One window through both; every bit of every layer's sum is compared."""
        rng = np.random.default_rng(seed)
        if prompt:
            self.experts.begin_prompt(rows)
        found, wanted = [], []
        for layer in range(layers or self.region.info.layers):
            x, ids, weights = self.choices(rng, rows)
            found.append(self.experts.forward(layer, *(t.to(self.device) for t in (x, ids, weights))))
            wanted.append(self.store.forward(layer, x, ids, weights))
        got = torch.stack(found).cpu()
        assert torch.equal(got, torch.stack(wanted)), f"{(got != torch.stack(wanted)).sum()} differ"
        self.experts.end_window()
        self.experts.settle()
        self.store.end_window()


class Captured:
    """A decode window of one size as a graph; `check` runs it on what a seed gives and compares every bit."""

    def __init__(self, rig: Rig, rows: int) -> None:
        info, device = rig.region.info, rig.device
        self._rig, self._rows = rig, rows
        self._layers = info.layers - info.draft_layers
        self._x = torch.zeros(self._layers, rows, info.hidden, device=device)
        self._ids = torch.arange(rig.chosen, dtype=torch.int32, device=device).repeat(self._layers, rows, 1)
        self._weights = torch.zeros(self._layers, rows, rig.chosen, device=device)
        self._out = torch.zeros_like(self._x)
        self._capture = captured(self._window, torch.device(device))

    def _window(self) -> None:
        for layer in range(self._layers):
            self._rig.experts.launch(layer, self._x[layer], self._ids[layer], self._weights[layer], self._out[layer])

    def __enter__(self) -> Captured:
        self.replay = self._capture.__enter__()
        self._rig.experts.discard_window()
        return self

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(None, None, None)

    def check(self, seed: int, *, thinking: bool = False) -> None:
        """`thinking`: as a lane does, beside the window, instead of all at once after it."""
        rig, rng = self._rig, np.random.default_rng(seed)
        given = [rig.choices(rng, self._rows) for _ in range(self._layers)]
        for layer, (x, ids, weights) in enumerate(given):
            self._x[layer], self._ids[layer], self._weights[layer] = x, ids, weights
        self._out.fill_(float("nan"))
        rig.experts.begin_window(self._rows)
        self.replay()
        if thinking:
            rig.experts.think()
        if rig.device == "cuda":
            torch.cuda.synchronize()
        rig.experts.end_window()
        if not thinking:
            rig.experts.settle()
        want = torch.stack([rig.store.forward(layer, *of) for layer, of in enumerate(given)])
        rig.store.end_window()
        got = self._out.cpu()
        assert torch.equal(got, want), f"seed {seed}: {(got != want).sum()} of {want.numel()} differ"
