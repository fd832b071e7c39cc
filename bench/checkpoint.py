"""Writes small random `qwen4_exp` checkpoints as Hugging Face directories, with numpy alone.

For tests, the demo and the workbench. Not here: what the tensors are (`tiny_model`) or reading checkpoints
(`shared_experts`). Invariant: one seed is one model in every layout, prefix and shard count.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.tiny_model import PRESETS, Layout, Tensor, TinyConfig, plan_tensors
from bench.tokenizer import ENDOFTEXT, IM_END, write_tokenizer

__all__ = ["PRESETS", "Layout", "TinyConfig", "write_checkpoint"]

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":  # round to nearest even
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return (
            ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
            .astype("<u2")
            .tobytes()
        )
    return np.ascontiguousarray(values).astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[dtype]).tobytes()


def _write_safetensors(path: Path, tensors: list[Tensor], dtype: str) -> int:
    """Writes one file, a tensor at a time, and returns the bytes of its tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        kind = "I64" if tensor.integer else dtype
        size = math.prod(tensor.shape) * {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}[kind]
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = tensor.make()
            assert values.shape == tensor.shape, (tensor.name, values.shape, tensor.shape)
            file.write(_encode(values, "I64" if tensor.integer else dtype))
    return position


def _shares(tensors: list[Tensor], shards: int) -> Iterator[list[Tensor]]:
    for shard in range(shards):
        yield tensors[len(tensors) * shard // shards : len(tensors) * (shard + 1) // shards]


def write_checkpoint(
    path: Path | str,
    config: TinyConfig,
    seed: int = 0,
    *,
    layout: Layout = "per_expert",
    prefix: str = "model.",
    dtype: str = "f32",
    shards: int = 1,
    mtp: bool = True,
    tokenizer: bool = True,
) -> Path:
    """Writes a checkpoint directory (which must not exist) and returns its path.

    `layout` also decides whether the n-gram table is one tensor ("fused") or `split_ngram_parts` shards. With
    `prefix="model.language_model."` the text config stands under `text_config`, as in the multimodal release.
    """
    if tokenizer and config.eos_token_id != ENDOFTEXT:
        raise ValueError(f"with a tokenizer eos_token_id is {ENDOFTEXT} (<|endoftext|>), not {config.eos_token_id}")
    path = Path(path)
    path.mkdir(parents=True)
    nested = prefix == "model.language_model."
    text = {**config.text_config(mtp=mtp), "dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]}
    if nested:
        whole: dict[str, object] = {
            "model_type": "qwen4_exp",
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "tie_word_embeddings": config.tie_word_embeddings,
            "text_config": text,
        }
    else:
        whole = {"architectures": ["Qwen4ExpForCausalLM"], **text}
    (path / "config.json").write_text(json.dumps(whole, indent=2))
    eos = [IM_END, ENDOFTEXT] if tokenizer else config.eos_token_id
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "do_sample": False}, indent=2))
    tensors = plan_tensors(config, seed, layout, prefix, mtp)
    if shards == 1:
        _write_safetensors(path / "model.safetensors", tensors, DTYPES[dtype])
    else:
        total, weight_map = 0, {}
        for number, share in enumerate(_shares(tensors, shards), 1):
            file = f"model-{number:05}-of-{shards:05}.safetensors"
            total += _write_safetensors(path / file, share, DTYPES[dtype])
            weight_map.update({tensor.name: file for tensor in share})
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if tokenizer:
        write_tokenizer(path, config.vocab_size)
    return path


def main() -> None:
    """`python -m bench.checkpoint OUT [--preset tiny|demo] …`."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--layout", choices=("per_expert", "fused"), default="per_expert")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--layers", type=int, help="another number of layers")
    chosen = parser.parse_args()
    config = PRESETS[chosen.preset]
    if chosen.layers:
        config = replace(config, num_hidden_layers=chosen.layers)
    write_checkpoint(chosen.out, config, chosen.seed, layout=chosen.layout, dtype=chosen.dtype, shards=chosen.shards)
    print(chosen.out)


if __name__ == "__main__":
    main()
