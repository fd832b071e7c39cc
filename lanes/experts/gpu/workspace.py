"""What the launches of one layer write and read, for windows of one size; the layers of a window use it in turn.

Letters: R rows, K experts per row, P = R * K pairs, H hidden, I intermediate, G group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.kernels.rows import Jobs, QuantisedRows
from shared_experts.layout import RecordLayout


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of every pair: pair p's is y[p], or y_cpu[slots[p]] where slots int32 [P] is not -1; both fp32 [?, H]."""

    y: torch.Tensor
    y_cpu: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Workspace:
    """Tensors of fixed places."""

    x: QuantisedRows
    jobs: Jobs
    slots: torch.Tensor  # int32 [P]
    h: torch.Tensor  # fp32 [P, I]
    quantised: QuantisedRows  # of h
    y: torch.Tensor  # fp32 [P, H]

    def erase(self) -> None:
        """Zeroes what is left of earlier rows."""
        for part in (self.x, self.quantised, self.jobs):
            part.fill_(0)
        for tensor in (self.slots, self.h, self.y):
            tensor.zero_()

    @classmethod
    def of(cls, layout: RecordLayout, rows: int, chosen: int, device: torch.device) -> Workspace:
        """For windows of `rows`."""
        pairs, group = rows * chosen, layout.format.group
        made = cls(
            QuantisedRows.room(rows, layout.hidden, group, device),
            Jobs.room(rows, chosen, device),
            torch.empty(pairs, dtype=torch.int32, device=device),
            torch.empty((pairs, layout.intermediate), device=device),
            QuantisedRows.room(pairs, layout.intermediate, group, device),
            torch.empty((pairs, layout.hidden), device=device),
        )
        made.erase()
        return made
