"""Makes a loaded model's eager blocks run a prompt's rows by kernels where there is one. Not here: kernels, blocks."""

from __future__ import annotations

from dataclasses import dataclass

from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.gpu.reader import PromptReader
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.qwen4_exp.stream import Block, Connected


@dataclass(frozen=True, slots=True)
class PromptKernels:
    """Of one model, shared by its layers."""

    reader: PromptReader

    def give(self, block: Block) -> None:
        """It uses them from here on."""
        if isinstance(block, Attention):
            block.reader = self.reader

    def take(self, block: Block) -> None:
        """It runs as on any device from here on."""
        if isinstance(block, Attention):
            block.reader = None


def kernels_of(spec: Spec) -> PromptKernels:
    """Sizes only; nothing is allocated."""
    return PromptKernels(PromptReader(spec))


def use_kernels(model: Qwen4Exp) -> None:
    """In the decoder layers."""
    kernels = kernels_of(model.spec)
    for connected in model.blocks:
        if isinstance(connected, Connected):
            kernels.give(connected.block)
