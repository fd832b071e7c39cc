"""The indexer of QSA attention: its scores, the selection they make, and the loss that teaches them.

    block key b = rotate_at(first token of b)(norm_k(mean of the block's raw keys))
    score(t, b) = sum over heads of relu(q_h . key_b) / sqrt(J)

The loss is the divergence of softmax(score) over a query's complete blocks from the attention mass that its heads gave
those blocks. Its inputs are detached: it moves the indexer alone, and nothing else moves the indexer.

Letters: B sequences, T tokens, R chosen queries, I index heads, J index size, r tokens per block, M blocks.
"""

from __future__ import annotations

import torch
from torch import nn

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.parts import Norm, Rotation, linear, rotate


class Indexer(nn.Module):
    """One attention layer's indexer."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self._heads, self._dim, self._block = c.indexer_n_heads, c.indexer_head_dim, c.indexer_compress_ratio
        self.index_qk_proj = linear(c.hidden_size, (self._heads + 1) * self._dim)
        self.q_layernorm, self.k_layernorm = Norm(self._dim, c.rms_norm_eps), Norm(self._dim, c.rms_norm_eps)

    def forward(self, u: torch.Tensor, at: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, T, I, J] and block keys [B, M, J] of u [B, T, H], which is not moved by them."""
        heads = self.index_qk_proj(u.detach()).unflatten(-1, (self._heads + 1, self._dim))
        q = rotate(self.q_layernorm(heads[:, :, :-1]), at)
        blocks = u.shape[1] // self._block
        raw = heads[:, : blocks * self._block, -1].unflatten(1, (blocks, self._block))
        keys = self.k_layernorm(raw.float().mean(2).to(raw.dtype))
        first = tuple(part[: blocks * self._block : self._block] for part in at)
        return q, rotate(keys[:, :, None], (first[0], first[1]))[:, :, 0]


def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp32 [B, R, M] for queries [B, R, I, J] and block keys [B, M, J]."""
    products = torch.einsum("brij,bmj->brim", q, keys).float().relu()
    return products.sum(2) * q.shape[-1] ** -0.5


def selected(score: torch.Tensor, positions: torch.Tensor, budget: int, block: int, tokens: int) -> torch.Tensor:
    """Which of `tokens` tokens each query may read: bool [B, R, tokens] from scores [B, R, M].

    The best `budget // block` complete blocks, lowest first among equals, and the open block up to the query itself.
    """
    complete = (positions + 1) // block  # [R]
    blocks = score.shape[-1]
    index = torch.arange(blocks, device=score.device)
    score = score.detach().masked_fill(index >= complete[:, None], -1.0) + 0.0
    keys = (score.view(torch.int32).to(torch.int64) << 32) - index  # no two are equal; negative scores sort last
    best = keys.topk(min(budget // block, blocks), dim=-1, sorted=False).indices
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
    mask = torch.zeros(*score.shape[:2], tokens, dtype=torch.bool, device=score.device)
    mask[..., : blocks * block] = chosen.repeat_interleave(block, -1)
    place = torch.arange(tokens, device=score.device)
    open_block = place >= complete[:, None] * block
    return (mask | open_block) & (place <= positions[:, None])


def selection_loss(score: torch.Tensor, mass: torch.Tensor, positions: torch.Tensor, block: int) -> torch.Tensor:
    """Mean divergence in nats; score [B, R, M], attention mass [B, R, T] that sums to one over the query's past."""
    blocks = score.shape[-1]
    hidden = torch.arange(blocks, device=score.device) >= ((positions + 1) // block)[:, None]
    mass = mass.detach()[..., : blocks * block].unflatten(-1, (blocks, block)).sum(-1).masked_fill(hidden, 0.0)
    mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    log_chosen = score.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (mass * (mass.clamp_min(1e-9).log() - log_chosen)).sum(-1).mean()
