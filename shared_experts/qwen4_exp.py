"""What a `qwen4_exp` text checkpoint must contain: sizes out of its config, then every tensor's name and shape.

Only sizes: what the numbers do is the lanes' matter. Canonical names are those that transformers' text-only model
gives, plus `mtp.*` for draft layers. Invariant: two `TextConfig`s that are equal name the same tensors.

Letters: H hidden, S residual streams, E experts, I expert intermediate, N n-gram heads.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shared_experts import limits
from shared_experts.fields import Fail, Fields

ARCHITECTURE = "qwen4_exp"
MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LINEAR, ATTENTION = "linear_attention", "indexed_attention"
_LAYER_TYPES = {"linear_attention": LINEAR, "indexed_attention": ATTENTION, "full_attention": ATTENTION}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NgramConstants:
    """The int64 hash constants of one n-gram layer."""

    multipliers: tuple[int, ...]  # [ngram_size]
    head_offsets: tuple[int, ...]  # [N]
    head_vocab_sizes: tuple[int, ...]  # [N]


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The sizes that decide names and shapes; `parse` reads them with transformers' defaults and with bounds."""

    vocab: int
    hidden: int
    layers: tuple[str, ...]  # LINEAR or ATTENTION
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    conv: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    intermediate: int
    shared_intermediate: int
    experts: int
    experts_per_token: int
    streams: int
    lowrank: int
    ple_layers: tuple[int, ...]  # 0-based, ascending
    ple_dim: int
    ple_conv: int
    ngram_size: int
    heads_per_ngram: int
    ngram_base: int
    ngram_divisor: int
    seed: int
    index_heads: int
    index_dim: int
    tied: bool
    draft_layers: int | None  # None: the config does not say

    @classmethod
    def parse(cls, config: object, fail: Fail) -> TextConfig:
        """Checks and reads the map of a text config."""
        fields = Fields(config, fail)
        kind = fields.text("model_type", 64)
        if kind not in MODEL_TYPES:
            raise fail(f"model_type {kind!r} is not read; known: {', '.join(MODEL_TYPES)}")
        width, heads, hidden = limits.WIDTH, 4096, fields.integer("hidden_size", 1, limits.HIDDEN)
        layers = fields.integer("num_hidden_layers", 1, limits.LAYERS)
        ple_layers = fields.integers("ple_layer_ids", layers, 1, layers, [])
        result = cls(
            vocab=fields.integer("vocab_size", 1, limits.VOCABULARY),
            hidden=hidden,
            layers=_layer_types(fields, layers),
            heads=fields.integer("num_attention_heads", 1, heads),
            kv_heads=fields.integer("num_key_value_heads", 1, heads, 2),
            head_dim=fields.integer("head_dim", 1, width, 256),
            attention_bias=fields.boolean("attention_bias", False),
            conv=fields.integer("linear_conv_kernel_dim", 1, 64, 4),
            key_heads=fields.integer("linear_num_key_heads", 1, heads, 16),
            key_dim=fields.integer("linear_key_head_dim", 1, width, 128),
            value_heads=fields.integer("linear_num_value_heads", 1, heads, 32),
            value_dim=fields.integer("linear_value_head_dim", 1, width, 128),
            intermediate=fields.integer("moe_intermediate_size", 1, limits.HIDDEN),
            shared_intermediate=fields.integer("shared_expert_intermediate_size", 1, width),
            experts=fields.integer("num_experts", 1, limits.EXPERTS),
            experts_per_token=fields.integer("num_experts_per_tok", 1, limits.EXPERTS, 10),
            streams=fields.integer("hc_count", 2, 64, 4),
            lowrank=fields.integer("hc_lowrank", 1, width, 320),
            ple_layers=tuple(sorted({layer - 1 for layer in ple_layers})),
            ple_dim=fields.integer("ple_embed_dim", 1, width, hidden),
            ple_conv=fields.integer("ple_conv_kernel_size", 1, 64, 4),
            ngram_size=fields.integer("ngram_size", 2, 16, 3),
            heads_per_ngram=fields.integer("heads_per_ngram", 1, limits.NGRAM_HEADS, 8),
            ngram_base=fields.integer("ngram_vocab_size_base", 2, 1 << 31, 20_000_000),
            ngram_divisor=fields.integer("make_ngram_vocab_size_divisible_by", 1, 1 << 20, 128),
            seed=fields.integer("seed", 0, (1 << 62) - 1, 1234),
            index_heads=fields.integer("indexer_n_heads", 1, heads, 1),
            index_dim=fields.integer("indexer_head_dim", 1, width, 128),
            tied=fields.boolean("tie_word_embeddings", False),
            draft_layers=_draft_layers(fields),
        )
        result._check(fields)
        return result

    def _check(self, fields: Fields) -> None:
        if self.experts_per_token > self.experts:
            fields.refuse(f"num_experts_per_tok {self.experts_per_token} is more than num_experts {self.experts}")
        if ATTENTION in self.layers and fields.values.get("indexer_n_heads") is None:
            fields.refuse("indexer_n_heads is missing")
        if fields.integer("indexer_kv_heads", 1, 4096, 1) != 1:
            fields.refuse("indexer_kv_heads must be 1")
        if self.ngram_heads > limits.NGRAM_HEADS or self.ple_dim % self.ngram_heads:
            fields.refuse(f"ple_embed_dim {self.ple_dim} is not a multiple of its {self.ngram_heads} n-gram heads")
        for layer in self.ple_layers:
            if self.layers[layer] != LINEAR:
                fields.refuse(f"ple_layer_ids names layer {layer + 1}, which is not {LINEAR}")

    @property
    def ngram_heads(self) -> int:
        """N: rows read per token and n-gram layer."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_columns(self) -> int:
        """Columns of an n-gram table."""
        return self.ple_dim // self.ngram_heads

    def ngram_rows(self, constants: NgramConstants) -> int:
        """Rows of an n-gram table, padded as the checkpoint's is."""
        return -(-sum(constants.head_vocab_sizes) // self.ngram_divisor) * self.ngram_divisor

    def dense_shapes(self, draft_layers: int, *, head: bool) -> Shapes:
        """Canonical name and shape of every dense tensor; `head`: with an lm_head of its own."""
        wide = self.streams * self.hidden
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index, kind in enumerate(self.layers):
            at = f"model.layers.{index}"
            shapes |= self._layer(at, kind)
            if index in self.ple_layers:
                shapes |= self._ple(f"{at}.ple")
        shapes |= self._residual("model.hyper_connection_mixer", inject=False)
        if head:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        if draft_layers:
            for name in ("fc_embedding", "fc_hidden"):
                shapes[f"mtp.{name}.weight"] = (self.hidden, self.hidden)
            shapes["mtp.pre_fc_norm_embedding.weight"] = (self.hidden,)
            shapes["mtp.pre_fc_norm_hidden.weight"] = (wide,)
            shapes |= self._residual("mtp.hyper_connection_mixer", inject=False)
        for index in range(draft_layers):
            shapes |= self._layer(f"mtp.layers.{index}", ATTENTION)
        return shapes

    def expert_prefix(self, layer: int) -> str:
        """Where the experts of a layer stand; draft layers follow the decoder layers."""
        decoder = len(self.layers)
        at = f"model.layers.{layer}" if layer < decoder else f"mtp.layers.{layer - decoder}"
        return f"{at}.mlp.experts"

    def _residual(self, at: str, *, inject: bool) -> Shapes:
        wide = self.streams * self.hidden
        shapes: Shapes = {
            f"{at}.hc_norm.weight": (wide,),
            f"{at}.input_mix_weight_down.weight": (self.lowrank, wide),
            f"{at}.input_mix_weight_up.weight": (wide, self.lowrank),
        }
        if inject:
            shapes[f"{at}.block_inject_weight.weight"] = (self.streams, wide)
        return shapes

    def _layer(self, at: str, kind: str) -> Shapes:
        hidden, shared = self.hidden, self.shared_intermediate
        shapes = self._delta_net(f"{at}.linear_attn") if kind == LINEAR else self._attention(f"{at}.self_attn")
        shapes |= {
            f"{at}.mlp.gate.weight": (self.experts, hidden),
            f"{at}.mlp.shared_expert.gate_proj.weight": (shared, hidden),
            f"{at}.mlp.shared_expert.up_proj.weight": (shared, hidden),
            f"{at}.mlp.shared_expert.down_proj.weight": (hidden, shared),
            f"{at}.mlp.shared_expert_gate.weight": (1, hidden),
        }
        shapes |= self._residual(f"{at}.attn_hyper_connection", inject=True)
        return shapes | self._residual(f"{at}.mlp_hyper_connection", inject=True)

    def _attention(self, at: str) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = {
            "q_proj": (2 * queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
        }
        shapes: Shapes = {f"{at}.{name}.weight": shape for name, shape in projections.items()}
        if self.attention_bias:
            shapes |= {f"{at}.{name}.bias": shape[:1] for name, shape in projections.items()}
        shapes |= {f"{at}.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        shapes[f"{at}.indexer.index_qk_proj.weight"] = ((self.index_heads + 1) * self.index_dim, self.hidden)
        return shapes | {f"{at}.indexer.{n}.weight": (self.index_dim,) for n in ("q_layernorm", "k_layernorm")}

    def _delta_net(self, at: str) -> Shapes:
        values = self.value_heads * self.value_dim
        mixed = 2 * self.key_heads * self.key_dim + values
        return {
            f"{at}.in_proj_qkv.weight": (mixed, self.hidden),
            f"{at}.in_proj_z.weight": (values, self.hidden),
            f"{at}.in_proj_b.weight": (self.value_heads, self.hidden),
            f"{at}.in_proj_a.weight": (self.value_heads, self.hidden),
            f"{at}.conv1d.weight": (mixed, 1, self.conv),
            f"{at}.dt_bias": (self.value_heads,),
            f"{at}.A_log": (self.value_heads,),
            f"{at}.norm.weight": (self.value_dim,),
            f"{at}.out_proj.weight": (self.hidden, values),
        }

    def _ple(self, at: str) -> Shapes:
        wide = self.streams * self.hidden
        return {
            f"{at}.key_proj.weight": (wide, self.ple_dim),
            f"{at}.value_proj.weight": (self.hidden, self.ple_dim),
            **{f"{at}.{name}.weight": (wide,) for name in ("norm_key", "norm_query", "norm_conv")},
            f"{at}.conv1d.weight": (wide, 1, self.ple_conv),
        }

    def ngram_constants(self, layer: int) -> NgramConstants:
        """The hash constants that transformers derives from the config for a (0-based) n-gram layer."""
        index, heads = self.ple_layers.index(layer), self.ngram_heads
        primes = (n for n in itertools.count(self.ngram_base) if _is_prime(n))
        sizes = tuple(itertools.islice(primes, index * heads, (index + 1) * heads))
        half = max(1, ((1 << 63) - 1) // self.vocab // 2)
        base = self.seed + 10007 * index
        multipliers = tuple(2 * (_splitmix64(base + _GAMMA * (i + 1)) % half) + 1 for i in range(self.ngram_size))
        offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
        return NgramConstants(multipliers, offsets, sizes)


_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    if value < 4 or value % 2 == 0:
        return value in (2, 3)
    return all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    if fields.values.get("layer_types") is None:
        interval = fields.integer("full_attention_interval", 1, limits.LAYERS, 4)
        return tuple(LINEAR if (i + 1) % interval else ATTENTION for i in range(layers))
    names = fields.sequence("layer_types", limits.LAYERS)
    if len(names) != layers:
        fields.refuse(f"layer_types has {len(names)} entries, num_hidden_layers is {layers}")
    for name in names:
        if type(name) is not str or name not in _LAYER_TYPES:
            fields.refuse(f"layer_types has {str(name)[:40]!r}; known: {', '.join(_LAYER_TYPES)}")
    return tuple(_LAYER_TYPES[str(name)] for name in names)


def _draft_layers(fields: Fields) -> int | None:
    if fields.values.get("mtp_num_hidden_layers") is None:
        return None
    return fields.integer("mtp_num_hidden_layers", 0, limits.DRAFT_LAYERS)
