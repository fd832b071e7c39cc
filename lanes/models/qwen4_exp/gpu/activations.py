"""What the blocks of a window write and read: allocated once for the most rows, shared by all layers and window sizes.

Not here: what outlives a window (lanes.state.seat, lag). Letters: R rows, S streams, H hidden, L low rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch

from lanes.kernels import products
from lanes.kernels.arithmetic import INTERPRETED
from lanes.kernels.products import FEW_ROWS
from lanes.models.ops import product
from lanes.models.qwen4_exp.spec import Spec

MOST_ROWS = 4
MOST_OUTPUTS = 1 << 16


class Narrowing:
    """A dataclass of tensors whose first dimension is rows."""

    __slots__ = ()

    def narrow(self, rows: int) -> Self:
        """The same tensors' first rows."""
        return type(self)(*(tensor[:rows] for tensor in self.tensors()))

    def only(self, row: int) -> Self:
        """One of the rows alone."""
        return type(self)(*(tensor[row : row + 1] for tensor in self.tensors()))

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Activations(Narrowing):
    """Of the residual streams. `rounded` tensors have the type of the matrix that reads them, all others are fp32."""

    x: torch.Tensor  # [R, S, H] the streams
    result: torch.Tensor  # [R, H] of the last block, not yet added to them; of few rows it is at once
    injection: torch.Tensor  # [R, S] with which it will be
    normed: torch.Tensor  # [R, S, H]
    normed_rounded: torch.Tensor  # [R, S, H]
    squashed_rounded: torch.Tensor  # [R, L]
    low: torch.Tensor  # [R, S, L + S] and
    scale: torch.Tensor  # [R, S] instead of the last three, of few rows
    u: torch.Tensor  # [R, H] what a block sees
    u_rounded: torch.Tensor  # [R, H]

    @classmethod
    def of(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> Activations:
        """For the most rows."""
        streams, hidden, low = spec.streams, spec.hidden, spec.lowrank

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((MOST_ROWS, *shape), dtype=dtype, device=device)

        return cls(
            room(streams, hidden), room(hidden), room(streams), room(streams, hidden),
            room(streams, hidden, dtype=dtype), room(low, dtype=dtype), room(streams, low + streams), room(streams),
            room(hidden), room(hidden, dtype=dtype),
        )  # fmt: skip


def multiply(x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 [R, N] = x [R, D], of the matrix's type, times matrix [N, D] transposed: `lanes.models.ops.product`.

    Where it is faster by our own kernel, which begins to read the matrix while the launch in front still runs; of the
    largest matrices cuBLAS reads as fast as memory gives. The interpreter takes its time, and has none of bf16.
    """
    if len(matrix) <= MOST_OUTPUTS and products.serves(matrix, len(x)) and not INTERPRETED:
        products.product(x, matrix, out)
    elif not matrix.is_cuda:
        out.copy_(product(x, matrix))
    elif matrix.dtype == torch.float32:
        torch.mm(x, matrix.t(), out=out)
    else:
        torch.mm(x, matrix.t(), out_dtype=torch.float32, out=out)


def _few(x: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether a result can go into the streams as it is computed."""
    return len(x) <= FEW_ROWS and matrix.dtype != torch.float32 and not INTERPRETED


def leave_block(x: torch.Tensor, matrix: torch.Tensor, a: Activations, bias: torch.Tensor | None = None) -> None:
    """A block's result, x [R, D] times matrix [H, D] transposed as `multiply` has it, + bias fp32 [H]: of few rows into
    the streams, else to `a.result`."""
    if _few(x, matrix) and bias is None:
        products.product_into(x, matrix, a.injection, a.x)
        return
    multiply(x, matrix, a.result)
    if bias is not None:
        a.result.add_(bias)
    if len(x) <= FEW_ROWS:
        a.x.addcmul_(a.injection[:, :, None], a.result[:, None, :])


def whole_streams(a: Activations) -> torch.Tensor:
    """`a.x` with the last block's result in it, which nothing adds after this."""
    if len(a.x) > FEW_ROWS:
        a.x.addcmul_(a.injection[:, :, None], a.result[:, None, :])
    a.injection.zero_()
    return a.x
