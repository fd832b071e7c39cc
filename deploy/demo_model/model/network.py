"""The whole model: embedding, layers over residual streams, mixer, tied head, and the draft layer.

Parameters have the names of the checkpoint, so export is a copy.

Letters: B sequences, T tokens, S streams, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.attention import Attention, Heads, Reading
from deploy.demo_model.model.deltanet import DeltaNet
from deploy.demo_model.model.moe import Moe
from deploy.demo_model.model.ngram import NgramLayer
from deploy.demo_model.model.parts import Inject, Mixer, Norm, Rotation, linear, rotation

EMBEDDING_STD = 0.05


@dataclass(frozen=True, slots=True)
class How:
    """How a pass runs."""

    reading: Reading = field(default_factory=Reading)
    ngrams: bool = True


@dataclass(slots=True)
class Passed:
    """What a pass gives: the streams before the mixer, and the losses beside the main one."""

    x: torch.Tensor  # [B, T, S, H]
    balance: torch.Tensor  # mean over layers
    selection: torch.Tensor  # mean over attention layers


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, c: TinyConfig, kind: str, ngram_place: int | None) -> None:
        super().__init__()
        gain = 1 / math.sqrt(2 * c.num_hidden_layers)
        sizes = (c.hc_count, c.hidden_size, c.hc_lowrank, c.rms_norm_eps)
        self.ple = None if ngram_place is None else NgramLayer(c, ngram_place)
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(c, gain)
        else:
            self.self_attn = Attention(c, gain)
        self.mlp = Moe(c, gain)
        self.attn_hyper_connection = Mixer(*sizes, injects=True)
        self.mlp_hyper_connection = Mixer(*sizes, injects=True)
        self.inject = Inject()
        self.linear = kind == "linear_attention"

    def forward(self, x: torch.Tensor, ids: torch.Tensor, at: Rotation, how: How) -> Passed:
        """One layer over the streams x [B, T, S, H]."""
        if self.ple is not None and how.ngrams:
            x = x + self.ple(x, ids)
        u, injection = self.attn_hyper_connection(x)
        selection = x.new_zeros((), dtype=torch.float32)
        if self.linear:
            y = self.linear_attn(u)
        else:
            y, selection = self.self_attn(u, at, how.reading)
        return self.after_mixing(x, injection, y, selection)

    def after_mixing(
        self, x: torch.Tensor, injection: torch.Tensor, y: torch.Tensor, selection: torch.Tensor
    ) -> Passed:
        """The rest of the layer, from what mixed the tokens."""
        x = self.inject(x, injection, y)
        u, injection = self.mlp_hyper_connection(x)
        y, balance = self.mlp(u)
        return Passed(self.inject(x, injection, y), balance, selection)


class Body(nn.Module):
    """Embedding, layers and mixer."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)
        places = {layer: place for place, layer in enumerate(sorted(set(c.ple_layer_ids)))}
        self.layers = nn.ModuleList(Layer(c, kind, places.get(i + 1)) for i, kind in enumerate(c.types))
        self.hyper_connection_mixer = Mixer(c.hc_count, c.hidden_size, c.hc_lowrank, c.rms_norm_eps, injects=False)


class Draft(nn.Module):
    """The draft layer: from a hidden state and the token that followed to the token after it."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.fc_embedding, self.fc_hidden = (linear(c.hidden_size, c.hidden_size) for _ in range(2))
        self.pre_fc_norm_embedding = Norm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(c.hc_count * c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(c, "full_attention", None)])
        self.hyper_connection_mixer = Mixer(c.hc_count, c.hidden_size, c.hc_lowrank, c.rms_norm_eps, injects=False)

    @property
    def layer(self) -> Layer:
        """The only one."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def enter(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Streams [B, T, S, H] from earlier streams x and the embedded next tokens [B, T, H]."""
        hidden = self.fc_hidden(self.pre_fc_norm_hidden(x.flatten(-2)).view_as(x))
        return (self.fc_embedding(self.pre_fc_norm_embedding(embedded))[..., None, :] + hidden).float()


class Network(nn.Module):
    """The demo model."""

    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        if not c.tie_word_embeddings:
            raise ValueError("the recipe ties the head to the embedding")
        self.config = c
        self.model = Body(c)
        self.mtp = Draft(c)

    def forward(self, ids: torch.Tensor, how: How = How()) -> Passed:
        """ids int64 [B, T]."""
        x = self.model.embed_tokens(ids)[:, :, None].expand(-1, -1, self.config.hc_count, -1)
        at = self.rotation(0, ids)
        balance, selection = [], []
        for layer in self.model.layers:
            passed = layer(x, ids, at, how)
            x = passed.x
            balance.append(passed.balance)
            selection += [] if layer.linear else [passed.selection]
        return Passed(x, torch.stack(balance).mean(), torch.stack(selection).mean())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, V] in the type of products."""
        return F.linear(self.model.hyper_connection_mixer(x)[0], self.model.embed_tokens.weight)

    def draft_logits(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, V] from the draft layer's streams."""
        return F.linear(self.mtp.hyper_connection_mixer(x)[0], self.model.embed_tokens.weight)

    def draft(self, x: torch.Tensor, ids: torch.Tensor, steps: int, how: How = How()) -> list[Passed]:
        """Passes of the draft layer after the streams x [B, T, S, H]: step d reads tokens d further on.

        ids: int64 [B, T + steps], of which ids[:, :T] made x. The first step reads its past as an attention layer does;
        a row of a later step reads the first step's rows up to its own and its own of the steps between, which is what
        drafting one token after another leaves in the cache.
        """
        tokens, layer, earlier = x.shape[1], self.mtp.layer, list[Heads]()
        passes = []
        for step in range(1, steps + 1):
            nexts = ids[:, step : step + tokens]
            x = self.mtp.enter(x, self.model.embed_tokens(nexts))
            at = self.rotation(step, nexts)
            if step == 1 and steps == 1:
                passed = layer(x, nexts, at, how)
            else:
                u, injection = layer.attn_hyper_connection(x)
                if step == 1:
                    earlier.append(layer.self_attn.project(u, at))
                    y, selection = layer.self_attn(u, at, replace(how.reading, budget=None))
                else:
                    y, selection = self._chained(u, at, earlier), x.new_zeros(())
                passed = layer.after_mixing(x, injection, y, selection)
            passes.append(passed)
            x = passed.x
        return passes

    def _chained(self, u: torch.Tensor, at: Rotation, earlier: list[Heads]) -> torch.Tensor:
        """Attention of a later draft step; its heads join `earlier`."""
        attention = self.mtp.layer.self_attn
        earlier.append(attention.project(u, at))
        heads = earlier[-1]
        groups = heads.q.shape[1] // heads.k.shape[1]
        k, v = (torch.cat([getattr(h, name) for h in earlier], 2).repeat_interleave(groups, 1) for name in ("k", "v"))
        tokens = u.shape[1]
        first = torch.ones(tokens, tokens, dtype=torch.bool, device=u.device).tril()
        own = torch.eye(tokens, dtype=torch.bool, device=u.device)
        mask = torch.cat([first, *[own] * (len(earlier) - 1)], 1)
        return attention.finish(F.scaled_dot_product_attention(heads.q, k, v, attn_mask=mask), heads.gate)

    def rotation(self, first: int, ids: torch.Tensor) -> Rotation:
        """Of the positions of ids [B, T], the first of which is `first`."""
        c = self.config
        return rotation(first, ids.shape[1], int(c.head_dim * c.partial_rotary_factor), c.rope_theta, ids.device)
