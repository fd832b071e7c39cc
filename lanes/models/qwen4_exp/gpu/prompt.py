"""Makes a loaded model's eager blocks run a prompt's rows by kernels where there is one. Not here: kernels, blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.kernels import delta_chunks
from lanes.models.delta_rule import RECURRENT_TOKENS, delta_rule, recurrent
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet, Rule
from lanes.models.qwen4_exp.gpu.reader import PromptReader
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Block, Connected


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Of one model, shared by its layers."""

    reader: PromptReader
    rule: Rule

    def give(self, block: Block) -> None:
        """It uses them from here on."""
        if isinstance(block, Attention):
            block.reader = self.reader
        if isinstance(block, DeltaNet):
            block.rule = self.rule

    def take(self, block: Block) -> None:
        """It runs as on any device from here on."""
        if isinstance(block, Attention):
            block.reader = None
        if isinstance(block, DeltaNet):
            block.rule = delta_rule


def kernels_of(spec: Spec) -> PromptKernels:
    """Sizes only; nothing is allocated."""
    return PromptKernels(
        PromptReader(spec), chunk_rule if delta_chunks.serves(spec.key_dim, spec.value_dim) else delta_rule
    )


def use_kernels(model: Qwen4Exp, context_tokens: int) -> None:
    """In the decoder layers; what a first short prompt would not compile is compiled now."""
    kernels = kernels_of(model.spec)
    kernels.reader.warm(context_tokens, model.device)
    for connected in model.blocks:
        if isinstance(connected, Connected):
            kernels.give(connected.block)


def chunk_rule(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """`lanes.models.delta_rule.delta_rule` by kernels, but for the few tokens that it takes one by one."""
    rule = recurrent if q.shape[0] <= RECURRENT_TOKENS else delta_chunks.delta_rule
    return rule(matrix, q, k, v, g, beta)
