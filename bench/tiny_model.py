"""Small random `qwen4_exp` models: the config and every tensor's name, shape and values, with numpy alone.

The weights mean nothing, but their scales keep activations and logits lively and finite, the router picks different
experts for different tokens, and no branch (convolutions, n-gram table, indexer) is zero. Not here: files.

Invariant: a tensor's values depend only on the seed and its canonical name, so every layout, prefix and shard count of
one seed is the same model.

Letters: V vocabulary, H hidden, S residual streams, E experts, I expert intermediate, N n-gram heads.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from bench.tokenizer import ENDOFTEXT

Layout = Literal["per_expert", "fused"]


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The text config of a small model, by the names that `config.json` uses; the defaults are the preset "tiny"."""

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 16
    linear_value_head_dim: int = 16
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 32
    num_experts_per_tok: int = 4
    num_experts: int = 16
    norm_topk_prob: bool = True
    layer_types: tuple[str, ...] | None = None  # None: every fourth layer "full_attention", the rest linear
    eos_token_id: int = ENDOFTEXT
    hc_count: int = 4
    hc_lowrank: int = 8
    ple_layer_ids: tuple[int, ...] = (2,)  # 1-based
    ple_embed_dim: int = 64
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 1000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 4
    indexer_n_heads: int = 2
    indexer_kv_heads: int = 1
    indexer_head_dim: int = 16
    indexer_budget: int = 32
    indexer_compress_ratio: int = 4
    output_gate_type: str = "sigmoid"
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (2, 1, 1)

    @property
    def types(self) -> list[str]:
        """The kind of every layer, as config.json spells it."""
        if self.layer_types is not None:
            return list(self.layer_types)
        return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(self.num_hidden_layers)]

    def text_config(self, *, mtp: bool) -> dict[str, object]:
        """The map that stands in config.json."""
        values: dict[str, object] = asdict(self)
        for name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
            del values[name]
        return {
            **values,
            "model_type": "qwen4_exp_text",
            "hidden_act": "silu",
            "layer_types": self.types,
            "ple_layer_ids": list(self.ple_layer_ids),
            "mtp_num_hidden_layers": int(mtp),
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": list(self.mrope_section),
                "mrope_interleaved": True,
            },
        }


PRESETS = {
    "tiny": TinyConfig(),
    "demo": TinyConfig(
        vocab_size=2048, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, num_experts_per_tok=4, num_experts=32,
        hc_lowrank=32, ple_embed_dim=256, ngram_vocab_size_base=4000, indexer_head_dim=32, indexer_budget=512,
        mrope_section=(3, 3, 2),
    ),
}  # fmt: skip


def hash_constants(config: TinyConfig, ple_index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(multipliers [ngram_size], offsets [N], vocab sizes [N]) of the n-gram layer number `ple_index`, int64."""

    def splitmix64(value: int) -> int:
        mask = 2**64 - 1
        value = (value + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    heads = (config.ngram_size - 1) * config.heads_per_ngram
    primes = (
        n for n in itertools.count(config.ngram_vocab_size_base) if all(n % d for d in range(2, math.isqrt(n) + 1))
    )
    sizes = np.array(list(itertools.islice(primes, ple_index * heads, (ple_index + 1) * heads)), np.int64)
    half = max(1, (2**63 - 1) // config.vocab_size // 2)
    base = config.seed + 10007 * ple_index
    multipliers = [
        2 * (splitmix64((base + 0x9E3779B97F4A7C15 * (i + 1)) & (2**64 - 1)) % half) + 1
        for i in range(config.ngram_size)
    ]
    return np.array(multipliers, np.int64), np.cumsum(sizes) - sizes, sizes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: its final name, shape and how to make it."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    integer: bool = False
    normal: tuple[float, float] | None = None  # (standard deviation, mean) where its values are just that


class _Plan:
    """Collects the tensors of one checkpoint; `prefix` replaces the canonical `model.`."""

    def __init__(self, seed: int, prefix: str) -> None:
        self.tensors: list[Tensor] = []
        self._seed, self._prefix = seed, prefix

    def name(self, canonical: str) -> str:
        return self._prefix + canonical[len("model.") :] if canonical.startswith("model.") else canonical

    def draw(self, canonical: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
        random = np.random.Generator(np.random.Philox([self._seed, zlib.crc32(canonical.encode())]))
        return random.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)

    def normal(self, canonical: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> None:
        made = Tensor(self.name(canonical), shape, lambda: self.draw(canonical, shape, std, mean), normal=(std, mean))
        self.tensors.append(made)

    def linear(self, canonical: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.normal(canonical + ".weight", (rows, columns), gain / math.sqrt(columns))

    def add(
        self, canonical: str, shape: tuple[int, ...], make: Callable[[], np.ndarray], integer: bool = False
    ) -> None:
        self.tensors.append(Tensor(self.name(canonical), shape, make, integer))


def _residual(plan: _Plan, at: str, config: TinyConfig, *, inject: bool) -> None:
    wide = config.hc_count * config.hidden_size
    plan.normal(f"{at}.hc_norm.weight", (wide,), 0.1)
    plan.linear(f"{at}.input_mix_weight_down", config.hc_lowrank, wide, 4.0)
    plan.linear(f"{at}.input_mix_weight_up", wide, config.hc_lowrank, 2.0)
    if inject:
        plan.linear(f"{at}.block_inject_weight", config.hc_count, wide, 2.0)


def _attention(plan: _Plan, at: str, c: TinyConfig) -> None:
    shapes = {
        "q_proj": (c.num_attention_heads * c.head_dim * 2, c.hidden_size),
        "k_proj": (c.num_key_value_heads * c.head_dim, c.hidden_size),
        "v_proj": (c.num_key_value_heads * c.head_dim, c.hidden_size),
        "o_proj": (c.hidden_size, c.num_attention_heads * c.head_dim),
    }
    for name, (rows, columns) in shapes.items():
        plan.linear(f"{at}.{name}", rows, columns, 2.0)
        if c.attention_bias:
            plan.normal(f"{at}.{name}.bias", (rows,), 0.1)
    for name in ("q_norm", "k_norm"):
        plan.normal(f"{at}.{name}.weight", (c.head_dim,), 0.1)
    index_rows = (c.indexer_n_heads + c.indexer_kv_heads) * c.indexer_head_dim
    plan.linear(f"{at}.indexer.index_qk_proj", index_rows, c.hidden_size)
    for name in ("q_layernorm", "k_layernorm"):
        plan.normal(f"{at}.indexer.{name}.weight", (c.indexer_head_dim,), 0.1)


def _delta_net(plan: _Plan, at: str, c: TinyConfig) -> None:
    values = c.linear_num_value_heads * c.linear_value_head_dim
    mixed = 2 * c.linear_num_key_heads * c.linear_key_head_dim + values
    heads = c.linear_num_value_heads
    plan.linear(f"{at}.in_proj_qkv", mixed, c.hidden_size, 2.0)
    plan.linear(f"{at}.in_proj_z", values, c.hidden_size, 2.0)
    plan.linear(f"{at}.in_proj_b", heads, c.hidden_size, 2.0)
    plan.linear(f"{at}.in_proj_a", heads, c.hidden_size, 2.0)
    plan.normal(f"{at}.conv1d.weight", (mixed, 1, c.linear_conv_kernel_dim), 0.5)
    plan.normal(f"{at}.dt_bias", (heads,), 1.0, -2.0)
    plan.normal(f"{at}.A_log", (heads,), 0.7, 0.5)
    plan.normal(f"{at}.norm.weight", (c.linear_value_head_dim,), 0.1, 1.0)
    plan.linear(f"{at}.out_proj", c.hidden_size, values, 2.0)


def _experts(plan: _Plan, at: str, c: TinyConfig, layout: Layout) -> None:
    up, down = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
    shapes = {"gate_proj": (up, 2.0), "up_proj": (up, 2.0), "down_proj": (down, 3.0)}

    def draw(expert: int, name: str) -> np.ndarray:
        shape, gain = shapes[name]
        return plan.draw(f"{at}.{expert}.{name}", shape, gain / math.sqrt(shape[1]))

    def fused(*names: str) -> np.ndarray:
        return np.stack([np.concatenate([draw(e, n) for n in names]) for e in range(c.num_experts)])

    if layout == "fused":
        plan.add(f"{at}.gate_up_proj", (c.num_experts, 2 * up[0], up[1]), lambda: fused("gate_proj", "up_proj"))
        plan.add(f"{at}.down_proj", (c.num_experts, *down), lambda: fused("down_proj"))
        return
    for expert, name in itertools.product(range(c.num_experts), shapes):
        plan.add(f"{at}.{expert}.{name}.weight", shapes[name][0], lambda e=expert, n=name: draw(e, n))  # type: ignore[misc]


def _ple(plan: _Plan, at: str, c: TinyConfig, ple_index: int, layout: Layout) -> None:
    wide = c.hc_count * c.hidden_size
    multipliers, offsets, sizes = hash_constants(c, ple_index)
    divisor = c.make_ngram_vocab_size_divisible_by
    rows, columns = -(-int(sizes.sum()) // divisor) * divisor, c.ple_embed_dim // len(sizes)
    table = f"{at}.ple_embedding.ngram_embedding"

    def draw(first: int, end: int) -> np.ndarray:
        return plan.draw(f"{table}.weight", (rows, columns), 1.0)[first:end]

    if layout == "fused":
        plan.add(f"{table}.weight", (rows, columns), lambda: draw(0, rows))
    else:
        step = -(-rows // c.split_ngram_parts)
        for part, first in enumerate(range(0, rows, step)):
            end = min(rows, first + step)
            plan.add(f"{table}.shard_{part}.weight", (end - first, columns), lambda a=first, b=end: draw(a, b))  # type: ignore[misc]
    for name, constant in (
        ("layer_multipliers", multipliers), ("ngram_heads_offsets", offsets), ("ngram_heads_vocab_sizes", sizes),
    ):  # fmt: skip
        plan.add(f"{at}.ple_embedding.{name}", constant.shape, lambda v=constant: v, integer=True)  # type: ignore[misc]
    plan.linear(f"{at}.key_proj", wide, c.ple_embed_dim)
    plan.linear(f"{at}.value_proj", c.hidden_size, c.ple_embed_dim)
    for name in ("norm_key", "norm_query", "norm_conv"):
        plan.normal(f"{at}.{name}.weight", (wide,), 0.1)
    plan.normal(f"{at}.conv1d.weight", (wide, 1, c.ple_conv_kernel_size), 0.4)


def _decoder_layer(plan: _Plan, at: str, c: TinyConfig, kind: str, layout: Layout) -> None:
    if kind == "linear_attention":
        _delta_net(plan, f"{at}.linear_attn", c)
    else:
        _attention(plan, f"{at}.self_attn", c)
    plan.linear(f"{at}.mlp.gate", c.num_experts, c.hidden_size, 4.0)
    _experts(plan, f"{at}.mlp.experts", c, layout)
    shared, hidden = c.shared_expert_intermediate_size, c.hidden_size
    plan.linear(f"{at}.mlp.shared_expert.gate_proj", shared, hidden, 2.0)
    plan.linear(f"{at}.mlp.shared_expert.up_proj", shared, hidden, 2.0)
    plan.linear(f"{at}.mlp.shared_expert.down_proj", hidden, shared, 2.0)
    plan.linear(f"{at}.mlp.shared_expert_gate", 1, hidden)
    _residual(plan, f"{at}.attn_hyper_connection", c, inject=True)
    _residual(plan, f"{at}.mlp_hyper_connection", c, inject=True)


def plan_tensors(c: TinyConfig, seed: int, layout: Layout, prefix: str, mtp: bool) -> list[Tensor]:
    """Every tensor of a checkpoint, in file order; `layout` shapes experts and n-gram table."""
    plan = _Plan(seed, prefix)
    plan.normal("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), 1.0)
    for layer, kind in enumerate(c.types):
        _decoder_layer(plan, f"model.layers.{layer}", c, kind, layout)
        if layer + 1 in c.ple_layer_ids:
            _ple(plan, f"model.layers.{layer}.ple", c, sorted(set(c.ple_layer_ids)).index(layer + 1), layout)
    _residual(plan, "model.hyper_connection_mixer", c, inject=False)
    if not c.tie_word_embeddings:
        plan.linear("lm_head", c.vocab_size, c.hidden_size, 4.0)
    if mtp:
        plan.linear("mtp.fc_embedding", c.hidden_size, c.hidden_size)
        plan.linear("mtp.fc_hidden", c.hidden_size, c.hidden_size)
        plan.normal("mtp.pre_fc_norm_embedding.weight", (c.hidden_size,), 0.1)
        plan.normal("mtp.pre_fc_norm_hidden.weight", (c.hc_count * c.hidden_size,), 0.1)
        _decoder_layer(plan, "mtp.layers.0", c, "full_attention", layout)
        _residual(plan, "mtp.hyper_connection_mixer", c, inject=False)
    return plan.tensors
