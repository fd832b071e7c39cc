"""The sizes of a model that a plan needs, read from what `python -m shared_experts inspect --json` says about a pack.

A pure function of that object. Not here: what fits where and how fast it is (sizing). Invariant: equal to the
arithmetic of the lanes' own spec, which this package may not import; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.errors import BadPack

ARCHITECTURES = ("qwen4_exp",)
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """All in bytes or counts; `element` below is the size of a dense weight and of a key where the lane keeps it."""

    name: str
    expert_format: str
    layers: int
    experts: int  # a layer
    experts_per_token: int  # a layer
    record_bytes: int  # one expert
    region_bytes: int  # all experts, those of the draft layer too
    dense_elements: int  # all dense weights, the embedding too
    dense_elements_per_token: int  # of these, read for one token
    embedding_elements: int  # of these, the embedding: a GPU lane keeps it in host memory
    pack_element_bytes: int  # of a dense weight in the pack
    key_elements_per_token: float  # one more token of a conversation, in elements of the dense type
    block_bytes_per_token: float  # and in fp32 block keys
    fixed_state_bytes: int  # a conversation of no length
    chunk_row_bytes: int  # of a GPU lane's activations, for each row of a prompt's chunk
    context_tokens: int
    ngram_bytes: int  # of the tables on disk

    @property
    def expert_bytes_per_token(self) -> int:
        """What one token reads of the experts when nothing is shared."""
        return self.layers * self.experts_per_token * self.record_bytes

    def conversation_bytes(self, tokens: int, element_bytes: int) -> int:
        """State of a conversation of that length."""
        grows = self.key_elements_per_token * element_bytes + self.block_bytes_per_token
        return self.fixed_state_bytes + int(tokens * grows)


def read_sizes(said: Mapping[str, Any]) -> ModelSizes:
    """From the object of `inspect --json`. Raises BadPack for a model that no plan knows."""
    if said.get("architecture") not in ARCHITECTURES:
        raise BadPack(f"a plan knows {', '.join(ARCHITECTURES)}, not {said.get('architecture')!r}")
    try:
        return _read(said)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadPack(f"its description lacks what a plan needs: {error!r}") from None


_DRAFT_WAITING_ROWS = 32  # tokens that may wait for the draft layer: their streams in fp32, and their ids


def _read(said: Mapping[str, Any]) -> ModelSizes:
    c, experts = said["config"], said["experts"]
    layers = int(c["num_hidden_layers"])
    kinds = c.get("layer_types")
    if kinds is None:
        interval = int(c.get("full_attention_interval", 4))
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    linear = sum(kind == "linear_attention" for kind in kinds)
    drafts = int(experts["draft_layers"] > 0)  # a lane uses one draft layer, which has keys of its own
    attention, ngram = layers - linear, len(set(c.get("ple_layer_ids") or ()))
    hidden, vocab, streams, lowrank = (int(c[k]) for k in ("hidden_size", "vocab_size", "hc_count", "hc_lowrank"))
    head, heads, kv = (int(c[k]) for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    index, block = int(c["indexer_head_dim"]), int(c["indexer_compress_ratio"])
    key_columns = int(c["linear_num_key_heads"]) * int(c["linear_key_head_dim"])
    value_heads, value_dim = int(c["linear_num_value_heads"]), int(c["linear_value_head_dim"])
    channels = 2 * key_columns + value_heads * value_dim
    wide = streams * hidden
    every = (
        2 * (2 * lowrank + streams) * wide
        + (int(c["num_experts"]) + 1) * hidden
        + 3 * hidden * int(c["shared_expert_intermediate_size"])
    )
    per_token = (
        layers * every
        + linear * hidden * (channels + 2 * value_heads * value_dim + 2 * value_heads)
        + attention * hidden * (head * (3 * heads + 2 * kv) + (int(c["indexer_n_heads"]) + 1) * index)
        + ngram * int(c.get("ple_embed_dim", hidden)) * (wide + hidden)
        + 2 * lowrank * wide
        + hidden * vocab
    )
    order = int(c.get("ngram_size", 3))
    recurrent = value_heads * int(c["linear_key_head_dim"]) * value_dim
    recurrent += (int(c["linear_conv_kernel_dim"]) - 1) * channels
    tails = (int(c.get("ple_conv_kernel_size", 4)) - 1) * order * wide
    element = ELEMENT_BYTES[str(said["dense_dtype"])]
    sections = said["sections"]
    return ModelSizes(
        name=str(said["name"]),
        expert_format=str(experts["format"]),
        layers=layers,
        experts=int(experts["experts"]),
        experts_per_token=int(c["num_experts_per_tok"]),
        record_bytes=int(experts["record_bytes"]),
        region_bytes=int(experts["bytes"]),
        dense_elements=sum(int(s["bytes"]) for s in sections if s["name"] == "dense") // element,
        dense_elements_per_token=per_token,
        embedding_elements=hidden * vocab,
        pack_element_bytes=element,
        key_elements_per_token=(attention + drafts) * (2 * kv * head + index),
        block_bytes_per_token=(attention + drafts) * 4 * index / block,
        fixed_state_bytes=4 * (linear * recurrent + ngram * tails)
        + (8 * (order - 1) if ngram else 0)
        + drafts * _DRAFT_WAITING_ROWS * (4 * wide + 8),
        chunk_row_bytes=4 * 4 * wide,  # three tensors of the streams live at once, a fourth is what pieces may lose
        context_tokens=int(c["max_position_embeddings"]),
        ngram_bytes=sum(int(s["bytes"]) for s in sections if str(s["name"]).startswith("ngram.")),
    )
