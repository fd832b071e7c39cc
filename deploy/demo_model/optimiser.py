"""Which parameters are moved how: matrices by orthogonalised momentum (Muon), everything else by AdamW.

Muon's update is scaled so that its root mean square is that of AdamW (0.2), so both share one learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from deploy.demo_model.model.network import Network

MOMENTUM, NEWTON_STEPS, UPDATE_RMS = 0.95, 5, 0.2
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Rows of these are few or mean one thing each: embeddings, routers, gates.
_NO_MATRIX = re.compile(r"embed|\.mlp\.gate\.|shared_expert_gate|in_proj_[ab]|block_inject|conv1d|norm")
_TABLE = "ngram_embedding"
TABLE_RATE = 3.0  # a row is seen rarely


def orthogonalised(momentum: torch.Tensor) -> torch.Tensor:
    """About U V^T of each matrix U S V^T in [n, rows, columns], by a quintic Newton iteration in bf16."""
    x = momentum.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(NEWTON_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; parameters are matrices [..., rows, columns]. Equal shapes are worked on together."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _momentum(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum: torch.Tensor = state["momentum"]
        return momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape[-2:], []).append(p)
            for shape, params in shapes.items():
                gradients = [p.grad for p in params if p.grad is not None]
                momenta = [self._momentum(p) for p in params]
                torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
                moved = torch._foreach_lerp(gradients, momenta, MOMENTUM)
                flat = [x.view(-1, *shape) for x in moved]
                updates = orthogonalised(torch.cat(flat)).split([f.shape[0] for f in flat])
                scale = group["lr"] * UPDATE_RMS * max(shape) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                steps = [update.view_as(p).to(p.dtype) for p, update in zip(params, updates, strict=True)]
                torch._foreach_add_(params, steps, alpha=-scale)


def optimisers(network: Network, weight_decay: float = 0.1) -> list[torch.optim.Optimizer]:
    """Muon and AdamW over all parameters. A group's `rate` multiplies the learning rate of the schedule."""
    matrices, table, rest = [], [], []
    for name, p in network.named_parameters():
        if _TABLE in name:
            table.append(p)
        elif p.ndim >= 2 and not _NO_MATRIX.search(name):
            matrices.append(p)
        else:
            rest.append(p)
    muon = Muon(matrices, 0.0, weight_decay)
    fused = rest[0].is_cuda
    adam = torch.optim.AdamW(
        [{"params": rest, "rate": 1.0}, {"params": table, "rate": TABLE_RATE}],
        lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused,
    )  # fmt: skip
    return [muon, adam]


def set_rate(optimisers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Sets the learning rate of every group."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("rate", 1.0)
