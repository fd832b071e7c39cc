"""The sizes of synthetic models: `true` is Qwen3.8-Flash-Next, the others fit smaller machines.

A draft layer is there where it is asked for (`changed`): its weights are random, so it tells what a guess costs.

Every scale keeps what routing depends on: many experts of which few are chosen, many layers, four residual streams.
Not here: values. Invariant: hidden sizes are multiples of 128, which the directions of `routing` need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.tiny_model import TinyConfig

NGRAM_BASE = 20_000  # rows per head, about; the true model's 20 million would be 102 GB


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's config, and over how many topics its vocabulary is spread."""

    name: str
    config: TinyConfig
    topics: int
    draft_layers: int = 0

    @property
    def layers(self) -> int:
        """All that have experts."""
        return self.config.num_hidden_layers + self.draft_layers

    @property
    def pairs(self) -> int:
        """Experts of all layers."""
        return self.layers * self.config.num_experts

    def changed(
        self, *, layers: int | None = None, experts: int | None = None, ngram: bool = True, draft_layers: int = 0
    ) -> Shape:
        """The same with other numbers of layers or experts, without the n-gram layer, or with a draft layer."""
        config = replace(
            self.config,
            num_hidden_layers=layers or self.config.num_hidden_layers,
            num_experts=experts or self.config.num_experts,
            ple_layer_ids=self.config.ple_layer_ids if ngram else (),
        )
        name = self.name if config == self.config else f"{self.name}, changed"
        return replace(
            self, name=f"{name} with a draft layer" if draft_layers else name, config=config, draft_layers=draft_layers
        )


_TRUE = TinyConfig(
    vocab_size=248320, hidden_size=2560, num_hidden_layers=48, num_attention_heads=24, num_key_value_heads=2,
    head_dim=256, max_position_embeddings=262144, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=48, moe_intermediate_size=640,
    shared_expert_intermediate_size=640, num_experts_per_tok=10, num_experts=512, hc_lowrank=320, ple_embed_dim=2560,
    heads_per_ngram=8, ngram_vocab_size_base=NGRAM_BASE, indexer_n_heads=4, indexer_head_dim=128, indexer_budget=2048,
    mrope_section=(11, 11, 10),
)  # fmt: skip

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("true", _TRUE, topics=64),
        # 1.2 GB of experts: what a small machine can hold and read from memory rather than from its caches
        Shape(
            "gigabyte",
            replace(
                _TRUE, vocab_size=32768, hidden_size=640, num_hidden_layers=24, num_attention_heads=6, head_dim=128,
                linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=12,
                moe_intermediate_size=192, shared_expert_intermediate_size=192, num_experts_per_tok=8, num_experts=256,
                hc_lowrank=80, ple_embed_dim=640, ngram_vocab_size_base=4000, indexer_head_dim=64,
                mrope_section=(6, 5, 5),
            ),
            topics=64,
        ),
        # 17 MB of experts: a test's
        Shape(
            "small",
            replace(
                _TRUE, vocab_size=4096, hidden_size=128, num_hidden_layers=16, num_attention_heads=4, head_dim=64,
                max_position_embeddings=32768, linear_key_head_dim=32, linear_value_head_dim=32,
                linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=64,
                shared_expert_intermediate_size=64, num_experts_per_tok=6, num_experts=64, hc_lowrank=16,
                ple_embed_dim=128, ngram_vocab_size_base=1000, indexer_n_heads=2, indexer_head_dim=32,
                indexer_budget=128, mrope_section=(3, 3, 2),
            ),
            topics=16,
        ),
    )
}  # fmt: skip
