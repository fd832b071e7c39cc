"""Experts of a layer for a window of rows: group the rows by expert, run the kernel where the records lie, combine.

Not here: the arithmetic (kernel), residency (cache), routing (models). Whatever is resident, the kernel reads the same
bytes and every pair's row is combined in ascending expert id: results are equal to the bit.

Invariant: scratch is bounded (`limits.SCRATCH_BYTES`); a window with more pairs runs in blocks of rows, which changes
no bit because every output row depends on its own input row only.

Letters: R rows, K experts chosen per row, P = R * K pairs, J distinct experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.counters import Counters
from lanes.experts.cache import ExpertCache
from lanes.experts.policy import Touched


class Kernel(Protocol):
    """The native kernel, or a twin of it."""

    def run(
        self,
        addresses: npt.NDArray[np.uint64],  # [J]
        row_offsets: npt.NDArray[np.int32],  # [J + 1]
        row_index: npt.NDArray[np.int32],  # [P]
        x: npt.NDArray[np.float32],  # [R, H]
        out: npt.NDArray[np.float32],  # [P, H]
    ) -> Any:
        """Every pair's unweighted expert row."""

    def combine(
        self,
        pair_index: npt.NDArray[np.int32],  # [R, K]
        weights: npt.NDArray[np.float32],  # [R, K]
        y: npt.NDArray[np.float32],  # [P, H]
        out: npt.NDArray[np.float32],  # [R, H]
    ) -> Any:
        """Every row's weighted sum, k in ascending order."""

    def erase(self) -> Any:
        """Zeroes what buffers hold of earlier rows."""


class Interrupted(Exception):
    """The window was given up between two layers; its sequences' states are half advanced."""


class ExpertStore:
    """All routed experts of the model; one engine thread uses it.

    `stopped` is asked before every layer and between blocks of rows: there a long window can be left.
    """

    def __init__(
        self, kernel: Kernel, cache: ExpertCache, counters: Counters, scratch_bytes: int = limits.SCRATCH_BYTES
    ) -> None:
        self._kernel = kernel
        self._cache = cache
        self._counters = counters
        self._scratch_bytes = scratch_bytes
        self.stopped: Callable[[], bool] = lambda: False
        self.recorder: Callable[[Touched], None] | None = None  # is told of every finished window
        self._scratch = np.empty((0, 0), np.float32)
        layers, experts = cache.addresses.shape
        self._rows = np.zeros((layers, experts), np.int64)  # rows routed to each expert in this window
        self._window_rows = 0
        self._chosen: dict[int, npt.NDArray[np.int64]] = {}  # by layer, of a window of few rows: [R, K]

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        """Nothing: one processor does one thing after another."""

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts per row, as `lanes.experts.protocol.Experts` says."""
        rows, hidden = x.shape
        self._window_rows = rows
        if self.stopped():
            raise Interrupted
        chosen = ids.shape[1]
        expert_ids, row_weights, inputs = ids.numpy(), weights.contiguous().numpy(), x.contiguous().numpy()
        if rows <= limits.MAX_WINDOW_TOKENS:
            self._chosen[layer] = expert_ids
        out = torch.empty((rows, hidden), dtype=torch.float32)
        result = out.numpy()
        block = max(1, self._scratch_bytes // (chosen * hidden * 4))
        for first in range(0, rows, block):
            if first and self.stopped():  # a layer of a long chunk takes longer than a cancel may
                raise Interrupted
            last = min(first + block, rows)
            self._block(
                layer, inputs[first:last], expert_ids[first:last], row_weights[first:last], result[first:last]
            )  # fmt: skip
        return out

    def keep(self, rows: int) -> None:
        """Only the first rows of the window were right: what the others chose is no use to come back for."""
        for layer, ids in self._chosen.items():
            np.subtract.at(self._rows[layer], ids[rows:].reshape(-1), 1)
        self._window_rows = rows

    def erase(self) -> None:
        """Zeroes what scratch holds of earlier windows: the next one is another tenant's."""
        self._scratch.fill(0.0)
        self._chosen.clear()
        self._kernel.erase()

    def end_window(self) -> None:
        """The safe point: residency may change now, and only now."""
        flat = self._rows.reshape(-1)
        keys = np.flatnonzero(flat)
        # A draft layer runs several times in a window: its experts count for at most as many rows as the window had.
        touched = Touched(keys, np.minimum(flat[keys], self._window_rows), self._window_rows)
        self._chosen.clear()
        if self.recorder is not None and keys.shape[0]:
            self.recorder(touched)
        self._cache.turn(touched)
        flat[keys] = 0

    def settle(self) -> None:
        """Nothing: `end_window` leaves nothing for later."""

    def _block(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        out: npt.NDArray[np.float32],
    ) -> None:
        rows, chosen = ids.shape
        pairs = rows * chosen
        flat = ids.reshape(-1)
        by_expert = np.argsort(flat, kind="stable")  # [P] pairs of one expert side by side, rows ascending
        sorted_ids = flat[by_expert]
        starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))  # [J]
        row_offsets = np.append(starts, pairs).astype(np.int32)
        row_index = (by_expert // chosen).astype(np.int32)
        place = np.empty(pairs, np.int32)
        place[by_expert] = np.arange(pairs, dtype=np.int32)
        if self._scratch.shape[0] < pairs or self._scratch.shape[1] != x.shape[1]:
            self._scratch = np.empty((pairs, x.shape[1]), np.float32)
        scratch = self._scratch[:pairs]
        experts = sorted_ids[starts]
        self._count(layer, experts, np.diff(row_offsets))
        self._kernel.run(self._cache.addresses[layer, experts], row_offsets, row_index, x, scratch)
        self._kernel.combine(place.reshape(rows, chosen), weights, scratch, out)

    def _count(self, layer: int, experts: npt.NDArray[np.int64], rows: npt.NDArray[np.int32]) -> None:
        """Pairs, and the bytes of every expert once per window. experts, rows: [J]."""
        seen, size = self._rows[layer], self._cache.record_bytes
        hit = self._cache.resident[layer, experts]
        new = seen[experts] == 0
        seen[experts] += rows
        hits, bytes_hit = int(rows[hit].sum()), int((new & hit).sum()) * size
        counters = self._counters
        counters.expert_hits += hits
        counters.expert_misses += int(rows.sum()) - hits
        counters.expert_hit_bytes += bytes_hit
        counters.expert_miss_bytes += int(new.sum()) * size - bytes_hit
