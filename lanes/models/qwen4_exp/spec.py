"""What a `qwen4_exp` model is: its sizes, read from a pack's config with bounds, and the arithmetic on them.

Not here: tensors. Invariant: a `Spec` that exists is consistent; every number was checked against a named limit, and
every pair that must divide or fit does.

Letters: H hidden, S residual streams, V vocabulary, E experts, K experts per token, I expert intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from lanes.models.config import ConfigReader, Limit
from lanes.models.errors import ConfigError
from lanes.state.shape import AttentionShape, DraftShape, NgramShape, RecurrentShape, StateShape
from shared_experts.layout import EXPERT_FORMATS, RecordLayout

LayerKind = Literal["deltanet", "attention"]
GateKind = Literal["sigmoid", "silu"]

VOCAB = Limit(2, 1 << 21)
HIDDEN = Limit(1, 1 << 15)
LAYERS = Limit(1, 512)
HEADS = Limit(1, 512)
HEAD_DIM = Limit(1, 1024)
INTERMEDIATE = Limit(1, 1 << 15)
EXPERTS = Limit(1, 1 << 13)
EXPERTS_PER_TOKEN = Limit(1, 64)
STREAMS = Limit(2, 16)
LOWRANK = Limit(1, 1 << 13)
CONV_TAPS = Limit(2, 16)
NGRAM_ORDER = Limit(2, 8)
NGRAM_HEADS = Limit(1, 64)
BLOCK_TOKENS = Limit(1, 64)
BUDGET_TOKENS = Limit(1, 1 << 20)
CONTEXT_TOKENS = Limit(1, 1 << 22)
DRAFT_LAYERS = Limit(0, 8)
LAYER_INTERVAL = Limit(1, 512)
THETA_LEAST, THETA_MOST = 1.0, 1e12
EPS_LEAST, EPS_MOST = 1e-12, 1e-2
MOST_EOS_IDS = 16
DRAFT_WAITING_ROWS = 32  # tokens the draft layer may be behind: it then reads them in one pass

# the two spellings of an attention layer: the real checkpoint says "full_attention", transformers rewrites it
LAYER_KINDS: dict[str, LayerKind] = {
    "linear_attention": "deltanet",
    "indexed_attention": "attention",
    "full_attention": "attention",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A checked `qwen4_exp` text config; build it with `from_config`."""

    vocab: int
    hidden: int
    layers: tuple[LayerKind, ...]
    max_tokens: int
    eps: float
    tied: bool
    # attention with its indexer
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: bool
    rotary_dim: int
    rope_theta: float
    index_heads: int
    index_dim: int
    index_budget_tokens: int
    index_block_tokens: int
    # gated DeltaNet
    conv_taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gate: GateKind
    # experts
    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    normalise_weights: bool
    # residual streams
    streams: int
    lowrank: int
    # n-gram layers, 0-based
    ngram_layers: tuple[int, ...]
    ngram_dim: int
    ngram_conv_taps: int
    ngram_order: int
    ngram_heads_per_order: int
    eos_ids: tuple[int, ...]  # the first one resets the n-gram context
    draft_layers: int

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Spec:
        """Reads the text config of a checkpoint; raises `ConfigError` naming the key and its range."""
        read = ConfigReader(config)
        read.choice("hidden_act", ("silu",), "silu")
        layers = _layers(read)
        ngram_layers = _ngram_layers(read, layers)
        hidden = read.integer("hidden_size", HIDDEN)
        head_dim = read.integer("head_dim", HEAD_DIM)
        vocab = read.integer("vocab_size", VOCAB)
        rotary_dim, theta = _rope(read, head_dim)
        spec = cls(
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            max_tokens=read.integer("max_position_embeddings", CONTEXT_TOKENS),
            eps=read.number("rms_norm_eps", EPS_LEAST, EPS_MOST, 1e-6),
            tied=read.flag("tie_word_embeddings", False),
            heads=read.integer("num_attention_heads", HEADS),
            kv_heads=read.integer("num_key_value_heads", HEADS),
            head_dim=head_dim,
            attention_bias=read.flag("attention_bias", False),
            rotary_dim=rotary_dim,
            rope_theta=theta,
            index_heads=read.integer("indexer_n_heads", HEADS),
            index_dim=read.integer("indexer_head_dim", HEAD_DIM),
            index_budget_tokens=read.integer("indexer_budget", BUDGET_TOKENS),
            index_block_tokens=read.integer("indexer_compress_ratio", BLOCK_TOKENS),
            conv_taps=read.integer("linear_conv_kernel_dim", CONV_TAPS),
            key_heads=read.integer("linear_num_key_heads", HEADS),
            value_heads=read.integer("linear_num_value_heads", HEADS),
            key_dim=read.integer("linear_key_head_dim", HEAD_DIM),
            value_dim=read.integer("linear_value_head_dim", HEAD_DIM),
            gate="silu" if read.choice("output_gate_type", ("sigmoid", "silu"), "silu") == "silu" else "sigmoid",
            experts=read.integer("num_experts", EXPERTS),
            experts_per_token=read.integer("num_experts_per_tok", EXPERTS_PER_TOKEN),
            intermediate=read.integer("moe_intermediate_size", INTERMEDIATE),
            shared_intermediate=read.integer("shared_expert_intermediate_size", INTERMEDIATE),
            normalise_weights=read.flag("norm_topk_prob", True),
            streams=read.integer("hc_count", STREAMS),
            lowrank=read.integer("hc_lowrank", LOWRANK),
            ngram_layers=ngram_layers,
            ngram_dim=read.integer("ple_embed_dim", HIDDEN, hidden),
            ngram_conv_taps=read.integer("ple_conv_kernel_size", CONV_TAPS, 4),
            ngram_order=read.integer("ngram_size", NGRAM_ORDER, 3),
            ngram_heads_per_order=read.integer("heads_per_ngram", NGRAM_HEADS, 8),
            eos_ids=_eos_ids(read, vocab, needed=bool(ngram_layers)),
            draft_layers=read.integer("mtp_num_hidden_layers", DRAFT_LAYERS, 0),
        )
        spec._check_pairs(read)
        return spec

    def _check_pairs(self, read: ConfigReader) -> None:
        """Conditions between values."""
        read.integer("indexer_kv_heads", Limit(1, 1), 1)
        read.integer("num_experts_per_tok", Limit(1, min(self.experts, EXPERTS_PER_TOKEN.most)))
        for key, value, other, divisor in (
            ("num_attention_heads", self.heads, "num_key_value_heads", self.kv_heads),
            ("linear_num_value_heads", self.value_heads, "linear_num_key_heads", self.key_heads),
            ("indexer_budget", self.index_budget_tokens, "indexer_compress_ratio", self.index_block_tokens),
            ("ple_embed_dim", self.ngram_dim, "(ngram_size - 1) * heads_per_ngram", self.ngram_heads),
        ):
            if value % divisor and (key != "ple_embed_dim" or self.ngram_layers):
                raise ConfigError(key, f"{value} is not a multiple of {other} = {divisor}")
        if self.rotary_dim > self.index_dim:
            raise ConfigError("indexer_head_dim", f"{self.index_dim} is below the {self.rotary_dim} rotated dimensions")

    # -- derived sizes

    @property
    def ngram_heads(self) -> int:
        """Rows read per token and n-gram layer: one per order (2..ngram_order) and head."""
        return (self.ngram_order - 1) * self.ngram_heads_per_order

    @property
    def ngram_reset(self) -> int:
        """The id that hides itself and everything before it from n-grams; 0 where there are none."""
        return self.eos_ids[0] if self.ngram_layers else 0

    @property
    def index_topk(self) -> int:
        """Complete blocks a query may read."""
        return self.index_budget_tokens // self.index_block_tokens

    def dense_rows(self, start: int) -> int:
        """Rows from position `start` on that read everything before them: those with at most topk complete blocks."""
        return max(0, (self.index_topk + 1) * self.index_block_tokens - 1 - start)

    @property
    def conv_channels(self) -> int:
        """Channels of a DeltaNet convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """0-based layers with attention."""
        return tuple(i for i, kind in enumerate(self.layers) if kind == "attention")

    @property
    def deltanet_layers(self) -> tuple[int, ...]:
        """0-based layers with a Gated DeltaNet."""
        return tuple(i for i, kind in enumerate(self.layers) if kind == "deltanet")

    def state_shape(self, dtype: torch.dtype, *, drafts: bool = False) -> StateShape:
        """What one sequence remembers when keys and values are kept in `dtype`; with the draft layer's part or not."""
        attention = AttentionShape(self.kv_heads, self.head_dim, self.index_dim, self.index_block_tokens, dtype)
        recurrent = RecurrentShape(
            self.value_heads, self.key_dim, self.value_dim, self.conv_channels, self.conv_taps - 1
        )
        ngram = NgramShape(self.streams * self.hidden, (self.ngram_conv_taps - 1) * self.ngram_order)
        return StateShape(
            attention=dict.fromkeys((*self.attention_layers, *([len(self.layers)] if drafts else [])), attention),
            recurrent=dict.fromkeys(self.deltanet_layers, recurrent),
            ngram=dict.fromkeys(self.ngram_layers, ngram),
            context_ids=self.ngram_order - 1 if self.ngram_layers else 0,
            context_fill=self.ngram_reset,
            max_tokens=self.max_tokens,
            draft=DraftShape(len(self.layers), self.streams * self.hidden, DRAFT_WAITING_ROWS) if drafts else None,
        )

    # -- arithmetic

    def kv_bytes_per_token(self, dtype: torch.dtype) -> float:
        """Bytes one more token adds, averaged over a block.

        Per attention layer: keys and values 2 · kv_heads · head_dim and a raw index key index_dim, in `dtype`, and one
        fp32 block key of index_dim for every index_block_tokens.
        """
        shape = self.state_shape(dtype)
        return sum(s.token_bytes() + s.block_bytes() / s.block_tokens for s in shape.attention.values())

    def state_bytes(self) -> int:
        """Bytes of a sequence's fixed part, all fp32: per DeltaNet layer value_heads · key_dim · value_dim and
        (conv_taps - 1) · conv_channels, per n-gram layer (ngram_conv_taps - 1) · ngram_order · streams · hidden; and
        8 per remembered token id.
        """
        return self.state_shape(torch.float32).fixed_bytes()

    def expert_bytes(self, format: str) -> int:
        """Bytes of one expert's record in `format`, padding included."""
        return RecordLayout.of(EXPERT_FORMATS[format], self.hidden, self.intermediate).record_bytes

    def expert_bytes_per_token(self, format: str) -> int:
        """Expert bytes a token reads when nothing is shared: layers · experts_per_token records."""
        return len(self.layers) * self.experts_per_token * self.expert_bytes(format)

    def dense_parameters_per_token(self) -> int:
        """Dense weights that one token multiplies with, the output head included, embedding rows not.

        Every layer: two mixers of (2 · lowrank + streams) · streams · hidden, router and shared gate
        (experts + 1) · hidden, shared expert 3 · hidden · shared_intermediate. DeltaNet: hidden ·
        (conv_channels + 2 · value_heads · value_dim + 2 · value_heads). Attention: hidden · head_dim ·
        (3 · heads + 2 · kv_heads) and hidden · (index_heads + 1) · index_dim. N-gram layer: ngram_dim · (streams + 1)
        · hidden. Once: the last mixer 2 · lowrank · streams · hidden and the head hidden · vocab.
        """
        wide = self.streams * self.hidden
        every = (
            2 * (2 * self.lowrank + self.streams) * wide
            + (self.experts + 1) * self.hidden
            + 3 * self.hidden * self.shared_intermediate
        )
        deltanet = self.hidden * (self.conv_channels + 2 * self.value_heads * self.value_dim + 2 * self.value_heads)
        attention = self.hidden * (
            self.head_dim * (3 * self.heads + 2 * self.kv_heads) + (self.index_heads + 1) * self.index_dim
        )
        return (
            len(self.layers) * every
            + len(self.deltanet_layers) * deltanet
            + len(self.attention_layers) * attention
            + len(self.ngram_layers) * self.ngram_dim * (wide + self.hidden)
            + 2 * self.lowrank * wide
            + self.hidden * self.vocab
        )

    def flops_per_token(self, context_tokens: int) -> int:
        """Floating point operations of one token at `context_tokens`, counting a multiply-add as two.

        Matrices: 2 per parameter, dense and 3 · hidden · intermediate for each chosen expert. Attention layer: 4 ·
        heads · head_dim per key read (scores and values), at most the budget plus an open block; indexer 2 ·
        index_heads · index_dim per complete block. DeltaNet: 6 · key_dim · value_dim per value head (read, write,
        query), and 2 · conv_taps · conv_channels.
        """
        experts = len(self.layers) * self.experts_per_token * 3 * self.hidden * self.intermediate
        keys = min(context_tokens, self.index_budget_tokens + self.index_block_tokens - 1)
        blocks = context_tokens // self.index_block_tokens
        attention = 4 * self.heads * self.head_dim * keys + 2 * self.index_heads * self.index_dim * blocks
        deltanet = 6 * self.value_heads * self.key_dim * self.value_dim + 2 * self.conv_taps * self.conv_channels
        return (
            2 * (self.dense_parameters_per_token() + experts)
            + len(self.attention_layers) * attention
            + len(self.deltanet_layers) * deltanet
        )


def _layers(read: ConfigReader) -> tuple[LayerKind, ...]:
    """The kind of each layer, from `layer_types` or, without it, from `full_attention_interval`."""
    count = read.integer("num_hidden_layers", LAYERS)
    names = read.items("layer_types", LAYERS.most)
    if names is None:
        interval = read.integer("full_attention_interval", LAYER_INTERVAL, 4)
        return tuple("deltanet" if (i + 1) % interval else "attention" for i in range(count))
    if len(names) != count:
        raise ConfigError("layer_types", f"has {len(names)} items, num_hidden_layers is {count}")
    kinds: list[LayerKind] = []
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in LAYER_KINDS:
            raise ConfigError(f"layer_types[{i}]", f"is not one of {', '.join(LAYER_KINDS)}")
        kinds.append(LAYER_KINDS[name])
    return tuple(kinds)


def _ngram_layers(read: ConfigReader, layers: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """0-based n-gram layers; the config counts from 1."""
    ids = read.items("ple_layer_ids", LAYERS.most) or []
    found = {Limit(1, len(layers)).check(f"ple_layer_ids[{i}]", value) - 1 for i, value in enumerate(ids)}
    for layer in found:
        if layers[layer] != "deltanet":
            raise ConfigError("ple_layer_ids", f"layer {layer + 1} is not a linear_attention layer")
    return tuple(sorted(found))


def _rope(read: ConfigReader, head_dim: int) -> tuple[int, float]:
    """(rotated dimensions, theta). Sections of multi-axis positions do not matter for text: all axes are equal."""
    rope = read.section("rope_parameters")
    rope.choice("rope_type", ("default",), "default")
    if "rope_theta" not in rope.values:
        rope = ConfigReader({**read.values, **rope.values})  # older configs keep both values at the top
    theta = rope.number("rope_theta", THETA_LEAST, THETA_MOST)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError("rope_parameters.partial_rotary_factor", f"rotates {rotary_dim} dimensions, not an even 2..")
    return rotary_dim, theta


def _eos_ids(read: ConfigReader, vocab: int, *, needed: bool) -> tuple[int, ...]:
    """One id or a list of them; n-gram layers need at least one."""
    key, limit = "eos_token_id", Limit(0, vocab - 1)
    value = read.values.get(key)
    ids = (read.items(key, MOST_EOS_IDS) or []) if isinstance(value, (list, tuple)) else [value] * (value is not None)
    if needed and not ids:
        raise ConfigError(key, "is missing; n-gram layers need it")
    return tuple(limit.check(key, item) for item in ids)
