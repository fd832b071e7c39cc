"""QSA attention for training: dense and causal, or over what the indexer selected, with the indexer's loss beside it.

Dense attention is one call. Selection works in slices of queries that are computed again in the backward pass, so
memory does not grow with the square of the context.

Letters: B sequences, T tokens, A heads, KV key/value heads, D head size, R queries of the indexer's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.indexer import Indexer, scores, selected, selection_loss
from deploy.demo_model.model.parts import Norm, Rotation, linear, rotate

SLICE_QUERIES = 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """How attention reads its past."""

    budget: int | None = None  # tokens that the indexer selects; None: everything
    taught: torch.Tensor | None = None  # positions int64 [R] whose queries teach the indexer


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention works on: q [B, A, T, D], k and v [B, KV, T, D], gate [B, T, A * D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor


class Attention(nn.Module):
    """One layer's QSA attention."""

    def __init__(self, c: TinyConfig, out_gain: float) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self._block = c.indexer_compress_ratio
        self.q_proj = linear(c.hidden_size, 2 * self._heads * self._dim)
        self.k_proj = linear(c.hidden_size, self._kv_heads * self._dim)
        self.v_proj = linear(c.hidden_size, self._kv_heads * self._dim)
        self.o_proj = linear(self._heads * self._dim, c.hidden_size, out_gain)
        self.q_norm, self.k_norm = Norm(self._dim, c.rms_norm_eps), Norm(self._dim, c.rms_norm_eps)
        self.indexer = Indexer(c)

    def forward(self, u: torch.Tensor, at: Rotation, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        """u, result: [B, T, H]; and the indexer's loss, zero without taught queries."""
        heads = self.project(u, at)
        loss = u.new_zeros((), dtype=torch.float32)
        sparse = reading.budget is not None and u.shape[1] >= reading.budget + self._block
        if not sparse and reading.taught is None:
            return self.finish(self.dense(heads), heads.gate), loss
        index_q, keys = self.indexer(u, at)
        if reading.taught is not None:
            score = scores(index_q[:, reading.taught], keys)
            loss = selection_loss(score, self._mass(heads, reading.taught), reading.taught, self._block)
        if not sparse:
            return self.finish(self.dense(heads), heads.gate), loss
        return self.finish(self._selecting(heads, index_q, keys, reading.budget), heads.gate), loss

    @torch.compiler.disable  # slices of many lengths
    def _selecting(self, heads: Heads, index_q: torch.Tensor, keys: torch.Tensor, budget: int | None) -> torch.Tensor:
        """[B, A, T, D], every query over what it selected."""
        slices = [
            checkpoint(self._sparse, heads.q, heads.k, heads.v, index_q, keys, first, budget, use_reentrant=False)
            for first in range(0, heads.q.shape[2], SLICE_QUERIES)
        ]
        return torch.cat(slices, 2)

    def project(self, u: torch.Tensor, at: Rotation) -> Heads:
        """Queries and keys, normed and rotated, values and gate."""
        q, gate = self.q_proj(u).unflatten(-1, (self._heads, 2, self._dim)).unbind(-2)
        q = rotate(self.q_norm(q), at)
        k = rotate(self.k_norm(self.k_proj(u).unflatten(-1, (self._kv_heads, self._dim))), at)
        v = self.v_proj(u).unflatten(-1, (self._kv_heads, self._dim))
        return Heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2))

    def dense(self, heads: Heads) -> torch.Tensor:
        """[B, A, T, D], every query over everything before it."""
        return F.scaled_dot_product_attention(heads.q, heads.k, heads.v, is_causal=True, enable_gqa=True)

    def finish(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The block's answer from what was read, [B, A, T, D]."""
        return self.o_proj(read.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def _sparse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        index_q: torch.Tensor,
        keys: torch.Tensor,
        first: int,
        budget: int,
    ) -> torch.Tensor:
        """Queries first .. over what they selected."""
        end = min(first + SLICE_QUERIES, q.shape[2])
        positions = torch.arange(first, end, device=q.device)
        with torch.no_grad():
            score = scores(index_q[:, first:end], keys[:, : end // self._block])
            mask = selected(score, positions, budget, self._block, end)
        groups = self._heads // self._kv_heads
        k, v = (x[:, :, :end].repeat_interleave(groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q[:, :, first:end], k, v, attn_mask=mask[:, None])

    @torch.no_grad()
    def _mass(self, heads: Heads, positions: torch.Tensor) -> torch.Tensor:
        """Attention mass fp32 [B, R, T] of all heads together."""
        q = heads.q[:, :, positions].unflatten(1, (self._kv_heads, -1))
        products = torch.einsum("bkgrd,bktd->bkgrt", q, heads.k).float() * self._dim**-0.5
        future = torch.arange(heads.k.shape[2], device=q.device) > positions[:, None]
        return products.masked_fill_(future, -torch.inf).softmax(-1).mean((1, 2))
