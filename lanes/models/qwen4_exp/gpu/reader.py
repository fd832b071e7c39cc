"""What reads keys and values for a prompt's rows on a GPU (lanes.kernels.prompt_attention, lanes.kernels.index).

Twin: `lanes.models.qwen4_exp.attention.Attention`'s own reader, to rounding. Not here: projections, norms, writing.

Letters: T rows, A heads, D head size, I index heads, J index size, B blocks, K blocks chosen.
"""

from __future__ import annotations

import torch

from lanes.kernels import index, prompt_attention
from lanes.models.qwen4_exp.gpu.attention import attention_shape
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import AttentionState

MOST_PRODUCT_BYTES = 64 << 20  # of index queries with keys, alive at once


class PromptReader:
    """Implements `lanes.models.qwen4_exp.attention.Reader`; shared by all layers."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.shape = spec, attention_shape(spec)

    def __call__(
        self, q: torch.Tensor, gate: torch.Tensor, index_q: torch.Tensor, state: AttentionState, start: int
    ) -> torch.Tensor:
        """[T, A, D] in the type of the keys, as the product behind it wants it."""
        q = q.to(state.keys.dtype).contiguous()
        dense = min(self._spec.dense_rows(start), q.shape[0])
        chosen = self.chosen(index_q[dense:], start + dense, state)
        out = torch.empty_like(q)
        prompt_attention.attend(self.shape, q, chosen, start, state.keys, state.values, gate, out)
        return out

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
