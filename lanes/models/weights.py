"""Dense tensors by name, checked for shape, in the type and on the device where a model wants them.

Two kinds of tensors leave here: matrices in the model's type, and small ones (norms, gates, routing) in fp32, because
rounding them costs accuracy and keeping them costs nothing. Not here: files (`shared_experts.pack`).

Invariant: a returned tensor is owned by the caller, contiguous, of the shape that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lanes.models.errors import WeightError

Read = Callable[[str], torch.Tensor]  # raises KeyError for an unknown name


@dataclass(frozen=True, slots=True)
class Weights:
    """Reads tensors below `scope`."""

    read: Read
    device: torch.device
    dtype: torch.dtype  # of matrices
    scope: str = ""
    sizes: list[int] = field(default_factory=list)  # bytes of every tensor made on the device so far

    def under(self, scope: str) -> Weights:
        """The same source, names continued by `scope` and a dot."""
        return replace(self, scope=f"{self.scope}{scope}.")

    def on_host(self) -> Weights:
        """The same source, tensors in host memory whatever the device (but none where only sizes are asked for)."""
        return replace(self, device=self.device if self.device.type == "meta" else torch.device("cpu"), sizes=[])

    def matrix(self, *parts: tuple[str, int], columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Matrices (name, rows) that read the same input, stacked into one [sum of rows, columns]."""
        dtype = dtype or self.dtype
        out = torch.empty((sum(rows for _, rows in parts), columns), dtype=dtype, device=self.device)
        first = 0
        for name, rows in parts:
            out[first : first + rows].copy_(self._tensor(name, (rows, columns)))
            first += rows
        self.sizes.append(out.nbytes)
        return out

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """A small tensor in fp32."""
        out = self._tensor(name, shape).to(self.device, torch.float32, copy=True).contiguous()
        self.sizes.append(out.nbytes)
        return out

    def bias(self, parts: Sequence[tuple[str, int]]) -> torch.Tensor:
        """Biases (name, rows) of stacked matrices, fp32."""
        return torch.cat([self.vector(name, rows) for name, rows in parts])

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        full = self.scope + name
        try:
            tensor = self.read(full)
        except KeyError:
            raise WeightError(full, "is missing") from None
        if tuple(tensor.shape) != shape:
            raise WeightError(full, f"has shape {tuple(tensor.shape)}, {shape} was expected")
        if not tensor.dtype.is_floating_point:
            raise WeightError(full, f"has type {tensor.dtype}, a floating-point type was expected")
        return tensor
