"""The expert that every token uses, between its two products and behind them, a launch each.

    activate   silu(gate) * up, in the type of the next product
    add        out += sigmoid(gate's score) * result of the shared expert

Not here: the products. Letters: R rows, I intermediate, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 256  # of one program


def activate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, I] of any float type = silu(gate) * up from gate_up fp32 [R, 2I], gate first."""
    rows, inner = out.shape
    _activate[(triton.cdiv(inner, COLUMNS), rows)](gate_up, out, I=inner, COLUMNS=COLUMNS, num_warps=2)


def add(out: torch.Tensor, score: torch.Tensor, result: torch.Tensor) -> None:
    """out fp32 [R, H] += sigmoid(score fp32 [R], at any stride) * result fp32 [R, H]."""
    rows, hidden = out.shape
    _add[(triton.cdiv(hidden, COLUMNS), rows)](
        out, score, score.stride(0), result, H=hidden, COLUMNS=COLUMNS, num_warps=2
    )


@triton.jit
def _activate(gate_up, out, I: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < I
    gate = tl.load(gate_up + row * 2 * I + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * I + I + at, mask=inside, other=0.0)
    tl.store(out + row * I + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def _add(out, score, stride, result, H: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < H
    share = 1.0 / (1.0 + tl.exp(-tl.load(score + row * stride)))
    value = tl.load(out + row * H + at, mask=inside, other=0.0)
    tl.store(out + row * H + at, value + share * tl.load(result + row * H + at, mask=inside, other=0.0), mask=inside)
