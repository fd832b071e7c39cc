"""The seam between a model and its experts: what a model asks for, whoever computes it.

Not here: where an expert's bytes lie, what is cached, which processor works.

Letters: R rows, H hidden size, K experts per row.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Experts(Protocol):
    """The routed experts of every layer of one model."""

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        """The next call of `forward` will be for this layer and these ids, the same tensor; the model may enqueue other
        work in between."""
        ...

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs per row: fp32 [R, H], freshly owned by the caller.

        x: fp32 [R, H], contiguous. ids: int64 [R, K], distinct and ascending within a row, in range.
        weights: fp32 [R, K], in the order of ids. `layer` is the 0-based decoder layer.
        The sum runs in ascending expert id (docs/expert-arithmetic.md, "Combine").
        """
        ...
