"""A mixture-of-experts block of a window: route, routed experts wherever they lie, the shared expert beside them.

Letters: R rows, E experts, K experts per row, I shared intermediate, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lanes.kernels import activation, route
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, Narrowing, multiply
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.spec import Spec


class Launches(Protocol):
    """Routed experts that a graph can hold."""

    def launch(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, turn: int = 0
    ) -> None:
        """out fp32 [R, H] = weighted sum of x fp32 [R, H] through experts ids int32 [R, K] by weights fp32 [R, K]."""


@dataclass(frozen=True, slots=True)
class MoeActivations(Narrowing):
    """Shared by all layers."""

    scores: torch.Tensor  # fp32 [R, E + 1], the shared expert's gate last
    ids: torch.Tensor  # int32 [R, K]
    weights: torch.Tensor  # fp32 [R, K]
    gate_up: torch.Tensor  # fp32 [R, 2I]
    active_rounded: torch.Tensor  # [R, I]
    shared: torch.Tensor  # fp32 [R, H]

    @classmethod
    def of(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> MoeActivations:
        """For the most rows."""
        inner, chosen = spec.shared_intermediate, spec.experts_per_token

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((MOST_ROWS, *shape), dtype=dtype, device=device)

        return cls(
            room(spec.experts + 1), room(chosen, dtype=torch.int32), room(chosen), room(2 * inner),
            room(inner, dtype=dtype), room(spec.hidden),
        )  # fmt: skip


class MoeWindow:
    """Twin of `lanes.models.qwen4_exp.moe.Moe`."""

    def __init__(self, block: Moe, spec: Spec, layer: int, experts: Launches) -> None:
        self._block, self._spec, self._layer, self._experts = block, spec, layer, experts

    def run(self, a: Activations, m: MoeActivations) -> None:
        """From u to result."""
        block, spec = self._block, self._spec
        multiply(a.u, block.router, m.scores)
        route.pick(m.scores, m.ids, m.weights, spec.experts, normalise=spec.normalise_weights)
        self._experts.launch(self._layer, a.u, m.ids, m.weights, a.result)
        multiply(a.u_rounded, block.gate_up, m.gate_up)
        activation.activate(m.gate_up, m.active_rounded)
        multiply(m.active_rounded, block.down, m.shared)
        activation.add(a.result, m.scores[:, -1], m.shared)
