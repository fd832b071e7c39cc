"""The sizes of the demo model and of its small twin for tests, as `config.json` names them; parameters and FLOPs.

Letters: H hidden, S streams, I expert intermediate.
"""

from __future__ import annotations

from dataclasses import replace

from bench.tiny_model import TinyConfig

CONTEXT_TOKENS = 32768
DEMO = TinyConfig(
    vocab_size=8192, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=True, linear_key_head_dim=64, linear_value_head_dim=32,
    linear_num_key_heads=4, linear_num_value_heads=8, moe_intermediate_size=64, shared_expert_intermediate_size=128,
    num_experts_per_tok=6, num_experts=64, eos_token_id=0, hc_count=4, hc_lowrank=16, ple_layer_ids=(2,),
    ple_embed_dim=128, heads_per_ngram=4, ngram_vocab_size_base=20000, indexer_n_heads=4, indexer_head_dim=32,
    indexer_budget=512, rope_theta=1e6, mrope_section=(3, 3, 2),
)  # fmt: skip
SMALL = replace(
    DEMO, vocab_size=512, hidden_size=64, num_hidden_layers=3, head_dim=16, linear_key_head_dim=16,
    linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, shared_expert_intermediate_size=64,
    num_experts=8, num_experts_per_tok=2, hc_lowrank=4, ple_embed_dim=64, ngram_vocab_size_base=200,
    indexer_n_heads=2, indexer_head_dim=16, indexer_budget=32, partial_rotary_factor=0.5, mrope_section=(2, 1, 1),
    layer_types=("linear_attention", "linear_attention", "full_attention"),
)  # fmt: skip


def parameters_used(c: TinyConfig) -> tuple[int, int]:
    """(parameters in products per token of one trunk pass without the head, of one draft layer without the head)."""
    wide, experts = c.hc_count * c.hidden_size, c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size
    every = 2 * (2 * c.hc_lowrank + c.hc_count) * wide + (c.num_experts + 1) * c.hidden_size + experts
    every += 3 * c.hidden_size * c.shared_expert_intermediate_size
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    deltanet = c.hidden_size * (2 * keys + 3 * values + 2 * c.linear_num_value_heads)
    heads = c.head_dim * (3 * c.num_attention_heads + 2 * c.num_key_value_heads)
    attention = c.hidden_size * (heads + (c.indexer_n_heads + 1) * c.indexer_head_dim)
    linear = c.types.count("linear_attention")
    ngrams = len(c.ple_layer_ids) * c.ple_embed_dim * (wide + c.hidden_size)
    trunk = len(c.types) * every + linear * deltanet + (len(c.types) - linear) * attention + ngrams
    return trunk, every + attention + 2 * c.hidden_size**2


def training_flops_per_token(c: TinyConfig, tokens: int, draft_passes: float) -> float:
    """Floating point operations of one token's forward and backward pass in sequences of `tokens`.

    Six per parameter used; causal attention reads half the sequence; `draft_passes` draft layers a token, each with the
    head. Not counted: elementwise work, the delta rule's small products, optimiser.
    """
    trunk, draft = parameters_used(c)
    head = c.vocab_size * c.hidden_size
    attention = 12 * c.num_attention_heads * c.head_dim * tokens / 2
    layers = len(c.types) - c.types.count("linear_attention")
    return 6 * (trunk + head) + layers * attention + draft_passes * (6 * (draft + head) + attention)
