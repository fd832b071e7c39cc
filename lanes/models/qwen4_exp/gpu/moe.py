"""A mixture-of-experts block of a window: route, routed experts wherever they lie, the shared expert beside them.

Letters: R rows, E experts, K experts per row, I shared intermediate, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from lanes.experts.gpu.workspace import Pairs
from lanes.kernels import shared
from lanes.kernels.products import FEW_ROWS
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, Narrowing
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.spec import Spec


class Launches(Protocol):
    """Routed experts that a graph can hold."""

    def launch_routed(
        self, layer: int, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        *, normalise: bool, turn: int = 0, ahead: torch.Tensor | None = None,
    ) -> Pairs:  # fmt: skip
        """Rows of every (row, expert) that the scores choose for x fp32 [R, H]; fills ids and weights [R, K].

        `turn` counts the calls of a draft layer between two windows; `ahead` is, for one row, a plan (gpu.ahead) of
        what may be sent for while experts miss.
        """


@dataclass(frozen=True, slots=True)
class MoeActivations(Narrowing):
    """Shared by all layers."""

    scores: torch.Tensor  # fp32 [R, E + 1], the shared expert's gate last
    ids: torch.Tensor  # int32 [R, K]
    weights: torch.Tensor  # fp32 [R, K]
    active_rounded: torch.Tensor  # [R, I] of the shared expert

    @classmethod
    def of(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> MoeActivations:
        """For the most rows."""
        inner, chosen = spec.shared_intermediate, spec.experts_per_token

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((MOST_ROWS, *shape), dtype=dtype, device=device)

        return cls(
            room(spec.experts + 1), room(chosen, dtype=torch.int32), room(chosen), room(inner, dtype=dtype),
        )  # fmt: skip


class MoeWindow:
    """Twin of `lanes.models.qwen4_exp.moe.Moe`."""

    def __init__(self, block: Moe, spec: Spec, layer: int, experts: Launches) -> None:
        self._block, self._spec, self._layer, self._experts = block, spec, layer, experts
        self.ahead: torch.Tensor | None = None  # a plan of what the next block reads first

    def run(self, a: Activations, m: MoeActivations, turn: int = 0) -> None:
        """From u to the block's result; `turn` as in `launch_routed`."""
        block, spec = self._block, self._spec
        shared.enter(a.u, block.router, m.scores, a.u_rounded, block.gate_up, m.active_rounded)
        pairs = self._experts.launch_routed(
            self._layer, a.u, m.scores, m.ids, m.weights, normalise=spec.normalise_weights, turn=turn,
            ahead=self.ahead if len(a.u) == 1 else None,
        )  # fmt: skip
        into = (a.x, a.injection) if len(a.x) <= FEW_ROWS else (a.result,)
        shared.leave(m.active_rounded, block.down, m.scores[:, -1], m.weights, pairs.y, pairs.y_cpu, pairs.slots, *into)
