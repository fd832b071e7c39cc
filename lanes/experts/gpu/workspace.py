"""What the launches of one layer write and read, for windows of one size; the layers of a window use it in turn.

Letters: R rows, K experts per row, P = R * K pairs, H hidden, I intermediate, G group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.kernels.experts import Jobs, QuantisedRows
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
        jobs = self.jobs
        rows = [tensor for part in (self.x, self.quantised) for tensor in (part.q, part.scale, part.correction)]
        for tensor in (*rows, jobs.expert, jobs.pairs, self.slots, self.h, self.y):
            tensor.zero_()

    @classmethod
    def of(cls, layout: RecordLayout, rows: int, chosen: int, device: torch.device) -> Workspace:
        """For windows of `rows`."""
        pairs = rows * chosen

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def quantised(count: int, width: int) -> QuantisedRows:
            groups = width // layout.format.group
            return QuantisedRows(
                room(count, width, dtype=torch.int8), room(count, groups), room(count, groups, dtype=torch.int32)
            )

        return cls(
            quantised(rows, layout.hidden),
            Jobs(room(pairs, dtype=torch.int32), room(pairs, rows, dtype=torch.int32)),
            room(pairs, dtype=torch.int32),
            room(pairs, layout.intermediate),
            quantised(pairs, layout.intermediate),
            room(pairs, layout.hidden),
        )
