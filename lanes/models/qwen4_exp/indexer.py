"""The indexer of QSA attention: which blocks of earlier tokens a query reads.

    block key b = rotate_at(first token of b)(norm_k(mean of the block's raw keys))     once, when the block completes
    score(t, b) = sum over heads of relu(q_h . key_b) / sqrt(J)
    a query at t reads the `topk` best of its (t + 1) // r complete blocks, and the open block's tokens

Equal scores: the lowest block wins (scores are often exactly zero). The mean is taken in fp32 and cast to the type of
the raw keys before the norm, as the reference does; raw keys are kept so that blocks can be formed anew.

Letters: T rows of a run, J index size, I index heads, r tokens per block, B blocks, k blocks chosen.
"""

from __future__ import annotations

import torch

from lanes.models.ops import rms, rotate, top_lowest
from lanes.models.qwen4_exp.rows import Rotation, Run
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights
from lanes.state.sequence import AttentionState

MOST_SCORE_BYTES = 4 << 20  # of scores and sort keys alive at once
MOST_SCORE_BYTES_CUDA = 64 << 20  # a GPU wants few launches instead


class Indexer:
    """One attention layer's indexer; its projection is part of the attention's."""

    def __init__(self, spec: Spec, weights: Weights) -> None:
        self._spec = spec
        self.norm_q = 1.0 + weights.vector("q_layernorm.weight", spec.index_dim)
        self.norm_k = 1.0 + weights.vector("k_layernorm.weight", spec.index_dim)

    def queries(self, projected: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Index queries fp32 [R, I, J] from their projection [R, I * J]."""
        q = projected.unflatten(1, (self._spec.index_heads, self._spec.index_dim))
        cos, sin = rotation
        return rotate(rms(q, self._spec.eps) * self.norm_q, cos[:, None], sin[:, None])

    def complete_blocks(self, state: AttentionState, run: Run) -> None:
        """Forms the keys of the blocks that the run's rows complete; their raw keys are in the state already."""
        size = self._spec.index_block_tokens
        first, end = run.start // size, run.stop // size
        if first == end:
            return
        raw = state.raw_index_keys[first * size : end * size].unflatten(0, (-1, size))
        mean = raw.float().mean(1).to(raw.dtype).float()
        state.block_keys[first:end] = rotate(rms(mean, self._spec.eps) * self.norm_k, *run.blocks)

    def choose(self, queries: torch.Tensor, start: int, state: AttentionState) -> torch.Tensor:
        """Chosen blocks int64 [T, k], ascending, for queries [T, I, J] that all have more than k complete blocks.

        They stand at positions start, start + 1, ... Works in slices of queries, so memory does not grow with T times
        the context.
        """
        spec = self._spec
        size, stop = spec.index_block_tokens, start + queries.shape[0]
        blocks = stop // size  # known here: a GPU is not asked
        complete = torch.arange(start + 1, stop + 1, device=queries.device) // size  # [T]
        keys = state.block_keys[:blocks]
        index = torch.arange(blocks, device=keys.device)
        most = MOST_SCORE_BYTES_CUDA if queries.is_cuda else MOST_SCORE_BYTES
        step = max(1, most // (blocks * (4 * spec.index_heads + 16)))
        chosen = []
        for q, end in zip(queries.split(step), complete.split(step), strict=True):
            scores = (q.flatten(0, 1) @ keys.T).relu_().unflatten(0, (-1, spec.index_heads)).sum(1)
            scores = scores.mul_(spec.index_dim**-0.5).masked_fill_(index >= end[:, None], -1.0)  # [t, B]
            chosen.append(top_lowest(scores, spec.index_topk))
        return torch.cat(chosen)
