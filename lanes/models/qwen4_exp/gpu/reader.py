"""Attention of a prompt's rows on a GPU between its products: norms, rotations and what is written by the kernel of
decode windows (lanes.kernels.attention), then lanes.kernels.index and lanes.kernels.prompt_attention.

Twin: `lanes.models.qwen4_exp.attention.Attention` without a reader, to rounding. Not here: products with weights.

Letters: T rows, A heads, D head size, I index heads, J index size, P rotated pairs, B blocks, K blocks chosen.
"""

from __future__ import annotations

import torch

from lanes.kernels import attention, index, prompt_attention
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.gpu.attention import attention_shape
from lanes.models.qwen4_exp.rows import Rotation, Rows, Run
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import AttentionState

MOST_PRODUCT_BYTES = 64 << 20  # of index queries with keys, alive at once


class PromptReader:
    """Implements `lanes.models.qwen4_exp.attention.Reader`; shared by all layers."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.shape = spec, attention_shape(spec)

    def __call__(self, block: Attention, projected: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[T, A * D] in the type of the keys, as the product behind it wants it."""
        shape, run = self.shape, rows.runs[0]
        state, start, count, device = run.state.attention[block.layer], run.start, len(projected), projected.device
        kept = attention.Kept(state.keys, state.values, state.raw_index_keys, state.block_keys)
        indexer = block.indexer
        queries = attention.Queries(
            torch.empty((count, shape.heads, shape.head_dim), dtype=state.keys.dtype, device=device),
            torch.empty((count, shape.index_heads, shape.index_dim), device=device),
        )
        attention.prepare(
            shape, projected, torch.full((1,), start, device=device),
            attention.Norms(block.norm_q, block.norm_k, indexer.norm_q, indexer.norm_k),
            attention.Angles(*rows.rotation, *self._ends(rows, run)), self._spec.eps, queries, kept,
        )  # fmt: skip
        dense = min(self._spec.dense_rows(start), count)
        chosen = self.chosen(queries.index[dense:], start + dense, state)
        out = torch.empty_like(queries.heads)
        gates = attention.gates(shape, projected)
        prompt_attention.attend(shape, queries.heads, chosen, start, state.keys, state.values, gates, out)
        return out.flatten(1)

    def _ends(self, rows: Rows, run: Run) -> Rotation:
        """[T, P] of rows that complete a block: of its first token; of others nobody reads it."""
        size = self.shape.block_tokens
        cos, sin = (torch.empty_like(x) for x in rows.rotation)
        for every, ends in zip((cos, sin), run.blocks, strict=True):
            every[(-run.start - 1) % size :: size] = ends
        return cos, sin

    def warm(self, context_tokens: int, device: torch.device) -> None:
        """Runs what only a sequence with more blocks than are chosen needs, on nobody's."""
        shape, capacity = self.shape, context_tokens // self.shape.block_tokens
        if capacity > shape.chosen:
            products = torch.zeros((1, shape.index_heads, shape.chosen + 1), device=device)
            start = (shape.chosen + 1) * shape.block_tokens - 1
            index.choose_rows(products, start, shape.block_tokens, shape.chosen, shape.index_dim, capacity)

    def chosen(self, queries: torch.Tensor, start: int, state: AttentionState) -> torch.Tensor:
        """int32 [T, K] for queries [T, I, J] that all have more than K complete blocks."""
        shape, rows = self.shape, queries.shape[0]
        chosen, size = shape.chosen, shape.index_dim
        blocks, capacity = (start + rows) // shape.block_tokens, state.block_keys.shape[0]
        if not rows:
            return torch.empty((0, chosen), dtype=torch.int32, device=queries.device)
        keys, step = state.block_keys[:blocks], max(1, MOST_PRODUCT_BYTES // (4 * shape.index_heads * blocks))
        found = []
        for first in range(0, rows, step):
            products = (queries[first : first + step].flatten(0, 1) @ keys.T).unflatten(0, (-1, shape.index_heads))
            found.append(index.choose_rows(products, start + first, shape.block_tokens, chosen, size, capacity))
        return found[0] if len(found) == 1 else torch.cat(found)
