"""The mixture of experts for training: rows sorted by expert, one grouped product for all experts.

`grouped` works on any device in bf16 and on a CPU in any type; `looped` is its plain twin. Groups are padded to a
multiple of eight rows, which grouped products on a GPU ask for.

Letters: R rows, H hidden, E experts, K experts per row, I intermediate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.parts import linear, working

PAD_ROWS = 8


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(self, c: TinyConfig, out_gain: float) -> None:
        super().__init__()
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        self.gate_up_proj = nn.Parameter(torch.randn(c.num_experts, 2 * inner, hidden) / math.sqrt(hidden))
        self.down_proj = nn.Parameter(torch.randn(c.num_experts, hidden, inner) * (out_gain / math.sqrt(inner)))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum over a row's experts [R, H]: x [R, H], ids int64 [R, K], weights fp32 [R, K]."""
        x, gate_up, down = working(x), working(self.gate_up_proj), working(self.down_proj)
        if x.dtype == torch.bfloat16:
            return grouped(x, ids, weights, gate_up, down)
        return looped(x, ids, weights, gate_up, down)


class Spread(torch.autograd.Function):
    """Rows to their places; a row's gradient is the sum over its places, gathered rather than added at random."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_of_place: torch.Tensor, place_of_choice: torch.Tensor) -> torch.Tensor:
        """[places, H] of x [R, H]; a row past the last one is zeros. place_of_choice: [R * K]."""
        ctx.save_for_backward(place_of_choice)
        ctx.rows = x.shape[0]
        return F.pad(x, (0, 0, 0, 1)).index_select(0, row_of_place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """[R, H]."""
        (place_of_choice,) = ctx.saved_tensors
        return grad.index_select(0, place_of_choice).view(ctx.rows, -1, grad.shape[-1]).sum(1), None, None


class Collect(torch.autograd.Function):
    """The answers of all choices from their places; padding has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, place_of_choice: torch.Tensor, choice_of_place: torch.Tensor
    ) -> torch.Tensor:
        """[R * K, H] of x [places, H]."""
        ctx.save_for_backward(choice_of_place)
        return x.index_select(0, place_of_choice)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """[places, H]."""
        (choice_of_place,) = ctx.saved_tensors
        return F.pad(grad, (0, 0, 0, 1)).index_select(0, choice_of_place), None, None


def looped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert after expert."""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(ids == expert)
        gate, up = (x[rows] @ gate_up[expert].T).chunk(2, -1)
        answer = (F.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, rows, answer * weights[rows, choice, None].to(answer.dtype))
    return out


def grouped(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One grouped product of sorted rows; nothing here waits for the device."""
    (rows, chosen), experts = ids.shape, gate_up.shape[0]
    flat = ids.flatten()
    order = flat.argsort(stable=True)  # choices by expert
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS
    ends = padded.cumsum(0)
    total = -(-rows * chosen // PAD_ROWS) * PAD_ROWS + experts * PAD_ROWS
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # how far padding moves a group
    sorted_ids = flat[order]
    places = torch.arange(rows * chosen, device=x.device) + shift[sorted_ids]
    ends = torch.cat((ends[:-1], ends.new_full((1,), total))).to(torch.int32)  # the rest belongs to the last group
    place_of_choice = torch.empty_like(order).scatter_(0, order, places)
    none = rows * chosen  # padding is nobody's choice
    choice_of_place = torch.full((total,), none, dtype=torch.int64, device=x.device).scatter_(0, places, order)
    wide = Spread.apply(x, choice_of_place // chosen, place_of_choice)  # [total, H]
    gate, up = torch._grouped_mm(wide, gate_up.mT, offs=ends).chunk(2, -1)
    answers = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    answers = Collect.apply(answers, place_of_choice, choice_of_place).view(rows, chosen, -1)
    return torch.einsum("rkh,rk->rh", answers, weights.to(answers.dtype))


class Shared(nn.Module):
    """The expert that every row uses."""

    def __init__(self, hidden: int, inner: int, out_gain: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden, out_gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, result: [R, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """One layer's router and experts."""

    def __init__(self, c: TinyConfig, out_gain: float) -> None:
        super().__init__()
        self._chosen = c.num_experts_per_tok
        self.gate = linear(c.hidden_size, c.num_experts)
        self.experts = Experts(c, out_gain)
        self.shared_expert = Shared(c.hidden_size, c.shared_expert_intermediate_size, out_gain)
        self.shared_expert_gate = linear(c.hidden_size, 1)

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """u, result [B, T, H]; and the balance loss, one where every expert gets its share."""
        x = u.flatten(0, 1)
        ids, weights, balance = self.route(x)
        out = self.experts(x, ids, weights)
        out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out.view_as(u), balance

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids int64 [R, K], weights fp32 [R, K] that sum to one, balance loss) for x [R, H]."""
        with torch.autocast(x.device.type, enabled=False):
            chances = F.linear(x.float(), self.gate.weight).softmax(-1)
        weights, ids = chances.topk(self._chosen, -1)
        experts = chances.shape[-1]
        uses = torch.zeros(experts, device=x.device).scatter_add_(0, ids.flatten(), torch.ones_like(weights).flatten())
        balance = experts * (uses / ids.numel() * chances.mean(0)).sum()
        return ids, weights / weights.sum(-1, keepdim=True), balance
