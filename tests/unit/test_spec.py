"""The spec of `qwen4_exp`: every bound at its limit and past it, conditions between values, and the arithmetic."""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.tiny_model import PRESETS, TinyConfig
from lanes.models.config import Limit
from lanes.models.errors import ConfigError
from lanes.models.qwen4_exp import spec as spec_module
from lanes.models.qwen4_exp.spec import Spec

PARTIAL = "rope_parameters.partial_rotary_factor"
TINY = PRESETS["tiny"].text_config(mtp=True)

# Qwen3.8-Flash-Next
REAL = {
    "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "num_experts_per_tok": 10,
    "num_experts": 512, "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560,
    "ngram_size": 3, "heads_per_ngram": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "eos_token_id": 248044, "output_gate_type": "sigmoid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip

LIMITS = {
    "vocab_size": spec_module.VOCAB, "hidden_size": spec_module.HIDDEN, "head_dim": spec_module.HEAD_DIM,
    "num_hidden_layers": spec_module.LAYERS, "num_attention_heads": spec_module.HEADS,
    "num_key_value_heads": spec_module.HEADS, "max_position_embeddings": spec_module.CONTEXT_TOKENS,
    "linear_conv_kernel_dim": spec_module.CONV_TAPS, "linear_key_head_dim": spec_module.HEAD_DIM,
    "linear_value_head_dim": spec_module.HEAD_DIM, "linear_num_key_heads": spec_module.HEADS,
    "linear_num_value_heads": spec_module.HEADS, "moe_intermediate_size": spec_module.INTERMEDIATE,
    "shared_expert_intermediate_size": spec_module.INTERMEDIATE, "num_experts_per_tok": spec_module.EXPERTS_PER_TOKEN,
    "num_experts": spec_module.EXPERTS, "hc_count": spec_module.STREAMS, "hc_lowrank": spec_module.LOWRANK,
    "ple_embed_dim": spec_module.HIDDEN, "ple_conv_kernel_size": spec_module.CONV_TAPS,
    "ngram_size": spec_module.NGRAM_ORDER, "heads_per_ngram": spec_module.NGRAM_HEADS,
    "indexer_n_heads": spec_module.HEADS, "indexer_head_dim": spec_module.HEAD_DIM,
    "indexer_budget": spec_module.BUDGET_TOKENS, "indexer_compress_ratio": spec_module.BLOCK_TOKENS,
    "mtp_num_hidden_layers": spec_module.DRAFT_LAYERS,
}  # fmt: skip


def refused(config: dict[str, object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Spec.from_config(config)
    return caught.value


def read(config: dict[str, object]) -> tuple[Spec | None, str]:
    try:
        return Spec.from_config(config), ""
    except ConfigError as error:
        return None, str(error)


def test_the_real_model():
    spec = Spec.from_config(REAL)
    assert spec.attention_layers == tuple(range(3, 48, 4))
    assert spec.ngram_layers == (1,)
    assert (spec.rotary_dim, spec.index_topk, spec.ngram_heads, spec.ngram_reset) == (64, 512, 16, 248044)
    # 12 layers of 2 * 2 * 256 values and 128 raw index values in bf16, and a quarter of a 512-byte block key
    assert spec.kv_bytes_per_token(torch.bfloat16) == 12 * (2 * (2 * 2 * 256 + 128) + 512 / 4)
    assert spec.state_bytes() == 36 * 4 * (48 * 128 * 128 + 3 * 10240) + 4 * 9 * 10240 + 8 * 2
    assert spec.expert_bytes("q4g64") == 2_613_248
    assert spec.expert_bytes("q4g32") == 2_764_800
    assert spec.expert_bytes_per_token("q4g64") == 480 * 2_613_248
    assert spec.dense_parameters_per_token() == pytest.approx(4.3e9, rel=0.02)
    active = spec.dense_parameters_per_token() + 480 * 3 * 2560 * 640
    assert spec.flops_per_token(0) == pytest.approx(2 * active, rel=0.03)
    assert spec.flops_per_token(2051) - spec.flops_per_token(0) == 12 * (4 * 24 * 256 * 2051 + 2 * 4 * 128 * 512)
    assert spec.flops_per_token(262144) - spec.flops_per_token(2051) == 12 * 2 * 4 * 128 * (65536 - 512)


@pytest.mark.parametrize("key", LIMITS)
def test_bounds(key):
    limit: Limit = LIMITS[key]
    for value in (limit.least - 1, limit.most + 1):
        error = refused({**TINY, key: value})
        assert error.key == key
        assert f"{limit.least}..{limit.most}" in str(error)
    for value in (limit.least, limit.most):  # inside the range; another value may not fit with it, but never this range
        error_text = read({**TINY, key: value})[1]
        assert f"{limit.least}..{limit.most}" not in error_text


@pytest.mark.parametrize("key", LIMITS)
@pytest.mark.parametrize("value", [True, 4.0, "4", [4], {}, 1 << 200, -(1 << 200)])
def test_hostile_types(key, value):
    error = refused({**TINY, key: value})
    assert error.key == key
    assert len(str(error)) < 200


@pytest.mark.parametrize("key", [k for k in LIMITS if not k.startswith(("ple_", "ngram", "heads_per", "mtp"))])
def test_missing_keys_are_named(key):
    assert refused({k: v for k, v in TINY.items() if k != key}).key == key


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"indexer_budget": 33}, "indexer_budget"),
        ({"ple_embed_dim": 63}, "ple_embed_dim"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_head_dim": 6}, "indexer_head_dim"),
        ({"layer_types": ["linear_attention"] * 7}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]}, "layer_types[7]"),
        ({"layer_types": ["linear_attention"] * 7 + [3]}, "layer_types[7]"),
        ({"layer_types": ["linear_attention"] * 513}, "layer_types"),
        ({"layer_types": "linear_attention"}, "layer_types"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids[0]"),
        ({"ple_layer_ids": [2, 9]}, "ple_layer_ids[1]"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": 512}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": [1] * 17}, "eos_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"output_gate_type": "tanh"}, "output_gate_type"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.1}}, PARTIAL),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.01}}, PARTIAL),
    ],
)  # fmt: skip
def test_conditions(change, key):
    assert refused({**TINY, **change}).key == key


def test_spellings():
    plain = Spec.from_config(TINY)
    assert plain.draft_layers == 1
    without = {k: v for k, v in TINY.items() if k != "layer_types"}
    assert Spec.from_config(without).layers == plain.layers
    assert Spec.from_config({**without, "full_attention_interval": 2, "ple_layer_ids": [1]}).attention_layers == (
        1,
        3,
        5,
        7,
    )
    renamed = ["indexed_attention" if t == "full_attention" else t for t in TINY["layer_types"]]  # type: ignore[attr-defined]
    assert Spec.from_config({**TINY, "layer_types": renamed}) == plain
    flat = {**TINY, "rope_parameters": {}, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert Spec.from_config(flat) == plain
    listed = Spec.from_config({**TINY, "eos_token_id": [7, 3]})
    assert (listed.eos_ids, listed.ngram_reset) == ((7, 3), 7)
    assert Spec.from_config({**TINY, "ple_layer_ids": None, "eos_token_id": None}).eos_ids == ()


@given(st.dictionaries(st.sampled_from(sorted(TINY)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)))  # fmt: skip
def test_any_config_is_read_or_refused(change):
    spec, error_text = read({**TINY, **change})
    assert len(error_text) < 300
    if spec:
        assert all(getattr(spec, f.name) is not None for f in fields(spec))
    else:
        assert error_text.startswith("config key ")


def test_dense_parameters_are_those_of_the_checkpoint():
    from bench.tiny_model import plan_tensors

    for config in (PRESETS["tiny"], PRESETS["demo"], TinyConfig(ple_layer_ids=(1, 2), hc_count=3)):
        matrices = sum(
            math.prod(t.shape)
            for t in plan_tensors(config, 0, "fused", "model.", False)
            if len(t.shape) == 2 and "embed" not in t.name
        )
        assert Spec.from_config(config.text_config(mtp=False)).dense_parameters_per_token() == matrices
