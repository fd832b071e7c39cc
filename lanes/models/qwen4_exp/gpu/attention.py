"""A QSA attention block of a window (lanes.kernels.attention, lanes.kernels.index).

Letters: R rows, A heads, D head size, K blocks chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.kernels import attention as kernels
from lanes.kernels import index
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, Narrowing, leave_block, multiply
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import AttentionState


def attention_shape(spec: Spec) -> kernels.AttentionShape:
    """Sizes for the kernels."""
    return kernels.AttentionShape(
        spec.heads, spec.kv_heads, spec.head_dim, spec.index_heads, spec.index_dim, spec.rotary_dim // 2,
        spec.index_block_tokens, spec.index_topk,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionActivations(Narrowing):
    """Shared by all layers."""

    projected: torch.Tensor  # fp32 [R, columns]
    queries: torch.Tensor  # [R, A, D] in the type of the keys
    index_queries: torch.Tensor  # fp32 [R, I, J]
    attended_rounded: torch.Tensor  # [R, A, D]
    chosen: torch.Tensor  # int32 [R, K] and what choosing needs
    scores: torch.Tensor
    bits: torch.Tensor
    candidates: torch.Tensor
    partial: torch.Tensor  # fp32 [R, splits, A, D]
    greatest: torch.Tensor  # fp32 [R, splits, A]
    total: torch.Tensor

    @classmethod
    def of(cls, spec: Spec, capacity_tokens: int, device: torch.device, dtype: torch.dtype) -> AttentionActivations:
        """For the most rows of a sequence of that capacity."""
        shape = attention_shape(spec)

        def room(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros((MOST_ROWS, *size), dtype=dtype, device=device)

        chosen = index.Chosen.of(MOST_ROWS, capacity_tokens // shape.block_tokens, shape.chosen, device)
        partial = kernels.Partial.of(shape, MOST_ROWS, device)
        return cls(
            room(shape.columns), room(shape.heads, shape.head_dim, dtype=dtype),
            room(shape.index_heads, shape.index_dim), room(shape.heads, shape.head_dim, dtype=dtype),
            chosen.ids, chosen.scores, chosen.bits, chosen.candidates, partial.values, partial.greatest, partial.total,
        )  # fmt: skip


class AttentionWindow:
    """Twin of `lanes.models.qwen4_exp.attention.Attention`; `state` lies in the seat."""

    def __init__(self, block: Attention, spec: Spec, state: AttentionState, length: torch.Tensor) -> None:
        self._block, self._length, self._eps = block, length, spec.eps
        self._shape = attention_shape(spec)
        self._kept = kernels.Kept(state.keys, state.values, state.raw_index_keys, state.block_keys)
        indexer = block.indexer
        self._norms = kernels.Norms(block.norm_q, block.norm_k, indexer.norm_q, indexer.norm_k)

    def run(self, a: Activations, t: AttentionActivations, angles: kernels.Angles) -> None:
        """From u to the block's result."""
        block, shape, length, kept = self._block, self._shape, self._length, self._kept
        self.remember(a, t, angles, length)
        chosen = index.Chosen(t.chosen, t.scores, t.bits, t.candidates)
        index.choose(t.index_queries, kept.block_keys, length, shape.block_tokens, chosen)
        partial = kernels.Partial(t.partial, t.greatest, t.total)
        kernels.attend(shape, t.queries, t.chosen, length, kept, partial)
        kernels.merge(shape, partial, length, kernels.gates(shape, t.projected), t.attended_rounded)
        leave_block(t.attended_rounded.flatten(1), block.output, a, block.output_bias)

    def remember(
        self, a: Activations, t: AttentionActivations, angles: kernels.Angles, length: torch.Tensor
    ) -> None:  # fmt: skip
        """The rows' keys and values alone, from u; they stand behind `length` int32 [1] others."""
        block = self._block
        multiply(a.u_rounded, block.inputs, t.projected)
        if block.input_bias is not None:
            t.projected.add_(block.input_bias)
        queries = kernels.Queries(t.queries, t.index_queries)
        kernels.prepare(self._shape, t.projected, length, self._norms, angles, self._eps, queries, self._kept)
