"""What the experts' launches pass on: quantised rows, and the jobs of a decode window. Rooms for both are made here.

Not here: what fills them (lanes.kernels.experts, post, route, jobs). A room holds anything until it is filled.

Letters: R rows (1..4), K experts per row, P = R * K pairs, J = P jobs at most, H hidden, I intermediate, G group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """A window's activations: q int8 [R, H], scale fp32 [R, H/G], correction int32 [R, H/G] (8 * sum of q; q4 only); or
    the intermediate of its pairs, [P, I]."""

    q: torch.Tensor
    scale: torch.Tensor
    correction: torch.Tensor

    @classmethod
    def room(cls, rows: int, width: int, group: int, device: torch.device | str = "cpu") -> QuantisedRows:
        """For so many rows of `width`."""
        groups = (rows, width // group)
        return cls(
            torch.empty((rows, width), dtype=torch.int8, device=device), torch.empty(groups, device=device),
            torch.empty(groups, dtype=torch.int32, device=device),
        )  # fmt: skip

    def fill_(self, value: int) -> QuantisedRows:
        """The same, with this everywhere."""
        for tensor in (self.q, self.scale, self.correction):
            tensor.fill_(value)
        return self


@dataclass(frozen=True, slots=True)
class Jobs:
    """Distinct experts: expert int32 [J], -1 for none; pairs int32 [J, R], the pair of every row, -1 for none."""

    expert: torch.Tensor
    pairs: torch.Tensor

    @classmethod
    def room(cls, rows: int, chosen: int, device: torch.device | str = "cpu") -> Jobs:
        """For windows of `rows`, K of each being `chosen`."""
        pairs = rows * chosen
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((pairs,), (pairs, rows))))

    def fill_(self, value: int) -> Jobs:
        """The same, with this everywhere."""
        for tensor in (self.expert, self.pairs):
            tensor.fill_(value)
        return self
