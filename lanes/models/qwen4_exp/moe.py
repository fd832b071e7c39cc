"""The mixture of experts: a router, the chosen experts, and one expert that every token uses.

    p = softmax(W_r u) in fp32; the K greatest; optionally made to sum to 1
    out = sum over chosen e of p_e * expert_e(u)  +  sigmoid(w_s u) * shared(u)

Router and shared gate stay fp32: which experts answer is a cliff, and a rounded score moves it. Not here: the experts
(lanes.experts), which get every token's choice in ascending expert id.

Letters: R rows, H hidden, E experts, K experts per token, I shared intermediate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lanes.experts.protocol import Experts
from lanes.models.ops import product, top_lowest
from lanes.models.qwen4_exp.rows import Rows
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights

Route = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]


class Moe:
    """One layer's experts."""

    def __init__(self, spec: Spec, weights: Weights, layer: int, experts: Experts) -> None:
        self._spec, self.layer, self.experts = spec, layer, experts
        self.router = weights.matrix(
            ("gate.weight", spec.experts), ("shared_expert_gate.weight", 1), columns=spec.hidden, dtype=torch.float32
        )  # [E + 1, H]
        shared = weights.under("shared_expert")
        inner = spec.shared_intermediate
        self.gate_up = shared.matrix(("gate_proj.weight", inner), ("up_proj.weight", inner), columns=spec.hidden)
        self.down = shared.matrix(("down_proj.weight", spec.hidden), columns=inner)
        self.route: Route = route

    def __call__(self, u: torch.Tensor, rows: Rows) -> torch.Tensor:
        """u, result: fp32 [R, H]."""
        scores = product(u, self.router)
        k, normalise = self._spec.experts_per_token, self._spec.normalise_weights
        if rows.near is None:
            ids, weights = self.route(scores[:, :-1], k, normalise)
        else:
            ids, weights = rows.near.route(self.layer, scores[:, :-1], k, normalise)
        self.experts.expect(self.layer, ids)
        gate, up = product(u, self.gate_up).chunk(2, dim=1)
        shared = product(F.silu(gate) * up, self.down)  # a GPU computes this while its host plans the routed ones
        out = self.experts.forward(self.layer, u, ids, weights)
        return out.addcmul_(scores[:, -1:].sigmoid(), shared)


def route(logits: torch.Tensor, k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [R, K] ascending, weights fp32 [R, K]) for router logits [R, E]; ties take the lowest id."""
    probabilities = logits.softmax(-1)
    ids = top_lowest(probabilities, k)
    weights = probabilities.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if normalise else weights
