"""N-gram embeddings for training: hashed rows of a table, gated by the streams, with a short convolution.

Letters: B sequences, T tokens, S streams, H hidden, N heads, D row columns.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from bench.tiny_model import TinyConfig, hash_constants
from deploy.demo_model.model.parts import Norm, Taps, linear

LEAST_GATE = 1e-6
TABLE_STD = 0.05


class Hashes(nn.Module):
    """The table and the constants that choose its rows, by the names of the checkpoint."""

    layer_multipliers: torch.Tensor
    ngram_heads_offsets: torch.Tensor
    ngram_heads_vocab_sizes: torch.Tensor

    def __init__(self, c: TinyConfig, place: int) -> None:
        super().__init__()
        multipliers, offsets, sizes = (torch.from_numpy(x) for x in hash_constants(c, place))
        rows = -(-int(sizes.sum()) // c.make_ngram_vocab_size_divisible_by) * c.make_ngram_vocab_size_divisible_by
        self.register_buffer("layer_multipliers", multipliers)
        self.register_buffer("ngram_heads_offsets", offsets)
        self.register_buffer("ngram_heads_vocab_sizes", sizes)
        self.ngram_embedding = nn.Embedding(rows, c.ple_embed_dim // len(sizes))
        nn.init.normal_(self.ngram_embedding.weight, std=TABLE_STD)
        self._order, self._heads, self._eos = c.ngram_size, c.heads_per_ngram, c.eos_token_id

    def row_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [B, T, N] for ids [B, T]; an end of text hides itself and what is before it."""
        mixed = ids * self.layer_multipliers[0]
        passed = torch.zeros_like(ids, dtype=torch.bool)
        out = []
        for shift in range(1, self._order):
            seen = F.pad(ids, (shift, 0), value=self._eos)[:, : ids.shape[1]]
            passed = passed | (seen == self._eos)
            mixed = mixed ^ (seen.masked_fill(passed, self._eos) * self.layer_multipliers[shift])
            heads = slice((shift - 1) * self._heads, shift * self._heads)
            out.append(mixed[..., None] % self.ngram_heads_vocab_sizes[heads] + self.ngram_heads_offsets[heads])
        return torch.cat(out, -1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, T, N * D]."""
        return self.ngram_embedding(self.row_ids(ids)).flatten(-2)


class NgramLayer(nn.Module):
    """One layer's n-gram embedding."""

    def __init__(self, c: TinyConfig, place: int) -> None:
        super().__init__()
        wide = c.hc_count * c.hidden_size
        self._streams, self._hidden = c.hc_count, c.hidden_size
        self.ple_embedding = Hashes(c, place)
        self.key_proj, self.value_proj = linear(c.ple_embed_dim, wide), linear(c.ple_embed_dim, c.hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = (Norm(wide, c.rms_norm_eps) for _ in range(3))
        self.conv1d = Taps(wide, c.ple_conv_kernel_size, c.ngram_size, 0.0)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What is added to x [B, T, S, H]."""
        embedded = self.ple_embedding(ids)
        key = self.norm_key(self.key_proj(embedded).unflatten(-1, (self._streams, self._hidden)))
        gate = (key.float() * self.norm_query(x).float()).sum(-1, keepdim=True) / math.sqrt(self._hidden)
        gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()
        gated = gate.sigmoid() * self.value_proj(embedded)[..., None, :]
        return gated + F.silu(self.conv1d(self.norm_conv(gated).flatten(-2))).view_as(gated)
