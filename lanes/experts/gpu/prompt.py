"""The routed experts of windows with many rows: grouped by expert, the missing ones copied through borrowed slots.

    forward(layer)   group the rows ─▶ steps of the ring ─▶ each: its copies are there, the next ones begin, it runs
    end_window       the slots go back, however the window ended

Only what was chosen is copied. Copies of a layer begin once its routing is known; the first half ring of the next one
waits for that. Not here: kernels (lanes.kernels.grouped), the order and the slots (lanes.experts.ring), counters.
Invariant: results are those of the decode kernels to the bit; slots are borrowed for one window at most.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from lanes import limits
from lanes.experts.cache import ExpertCache
from lanes.experts.ring import Ring, Step
from lanes.kernels import experts, grouped
from lanes.kernels.experts import QuantisedRows
from shared_experts.manifest import ExpertsInfo

RING_SHARE = 8  # at most one slot of so many is borrowed


class PromptExperts:
    """One engine thread uses it, through `GpuExperts`."""

    def __init__(self, cache: ExpertCache, info: ExpertsInfo, device: torch.device) -> None:
        self._cache, self._info, self._layout, self._device = cache, info, info.layout, device
        self._borrowed = contextlib.ExitStack()
        self._ring: Ring | None = None
        self._slots: list[int] = []
        self._open = False

    def begin_window(self) -> bool:
        """Borrows slots, once a window; whether experts have lost theirs, so that tables must be published."""
        if self._open:
            return False
        self._open = True
        wanted = min(limits.RING_SLOTS, self._cache.room // RING_SHARE)
        version = self._cache.version
        self._slots = self._borrowed.enter_context(self._cache.lend(wanted))
        self._ring = Ring(len(self._slots)) if self._slots else None
        return self._cache.version != version

    def end_window(self) -> None:
        """Gives back what was borrowed."""
        self._borrowed.close()
        self._ring, self._slots, self._open = None, [], False

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """out fp32 [R, H] = the weighted sum of x fp32 [R, H] through experts ids [R, K]; all contiguous."""
        group, count = self._layout.format.group, self._info.experts
        rows = self._quantised(len(x), self._layout.hidden)
        experts.quantise_rows(x, rows, group)
        groups = grouped.group(ids, count)  # waits for the routing
        places = np.diff(groups.offsets)
        needed = np.flatnonzero(places).tolist()
        resident = set(np.flatnonzero(self._cache.resident[layer]).tolist())
        table = self._cache.addresses[layer].astype(np.int64)
        steps = self._ring.layer(needed, resident, count) if self._ring else [Step(0, 0, count, (), 0)]
        for step in steps:
            for expert, slot in step.copies:
                table[expert] = self._cache.address(self._slots[slot])
        addresses = torch.from_numpy(table).to(self._device, non_blocking=True)
        room = max(limits.PROMPT_PLACES, int(places.max()))
        room = min(room, ids.numel())
        h, y = (torch.empty(room, width, device=self._device) for width in (self._layout.intermediate, len(x[0])))
        inner = self._quantised(room, self._layout.intermediate)
        out.zero_()
        begun = 0
        for at, step in enumerate(steps):
            begun = self._begin(layer, steps, begun, at + 1, step.number)
            self._cache.join()
            begun = self._begin(layer, steps, begun, len(steps), step.number)
            for work in grouped.batches(groups, step.first, step.end, room):
                grouped.run(self._layout, addresses, groups, work, rows, weights, h, inner, y, out)

    def _begin(self, layer: int, steps: list[Step], begun: int, until: int, over: int) -> int:
        """Begins copies of steps begun..until-1 as far as `over` enqueued steps allow; how many have begun then."""
        while begun < until and steps[begun].after <= over:
            first = layer * self._info.experts
            self._cache.fetch([(first + expert, self._slots[slot]) for expert, slot in steps[begun].copies])
            begun += 1
        return begun

    def _quantised(self, rows: int, width: int) -> QuantisedRows:
        sizes = (rows, width // self._layout.format.group)
        return QuantisedRows(
            torch.empty((rows, width), dtype=torch.int8, device=self._device),
            torch.empty(sizes, device=self._device),
            torch.empty(sizes, dtype=torch.int32, device=self._device),
        )
