"""Writes small random `qwen4_exp` checkpoints as Hugging Face directories, with numpy alone.

For tests, the demo and the workbench. Not here: what the tensors are (`tiny_model`) or reading checkpoints
(`shared_experts`). Invariant: one seed is one model in every layout, prefix and shard count.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.tiny_model import PRESETS, Layout, Tensor, TinyConfig, plan_tensors
from bench.tokenizer import ENDOFTEXT, IM_END, write_tokenizer

__all__ = ["PRESETS", "Layout", "TinyConfig", "write_checkpoint"]

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "fp8": "BF16"}  # of whatever is no FP8 tensor
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1}
_CONFIG_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
_FP8 = re.compile(
    r".*\.(mlp\.experts\..*|shared_expert\.\w+\.weight|self_attn\.[qkvo]_proj\.weight"
    r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight|ngram_embedding\..*weight)"
)
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: Callable[[], bytes]

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return _bf16(values).tobytes()
    return np.ascontiguousarray(values).astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[dtype]).tobytes()


def _bf16(values: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: np.ndarray = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2")


def _e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest code of values within 448."""
    codes = np.arange(127)
    exponent, fraction = codes >> 3, codes & 7
    positive = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    nearest = np.searchsorted((positive[1:] + positive[:-1]) / 2, np.abs(values))
    result: np.ndarray = (nearest + 128 * np.signbit(values)).astype(np.uint8)
    return result


def _as_fp8(tensor: Tensor) -> list[Stored]:
    """Codes, and a scale per block of 128 x 128; n-gram tables have one scale, linear attention's scales are bf16."""
    rows, columns = tensor.shape[-2:]
    one = ".ngram_embedding." in tensor.name
    dtype = "BF16" if ".linear_attn." in tensor.name else "F32"
    grid = () if one else (*tensor.shape[:-2], -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))

    def split() -> tuple[np.ndarray, np.ndarray]:
        values = tensor.make()
        if one:
            scales = wide = np.abs(values).max(keepdims=True) / np.float32(448)
        else:
            padded = np.zeros((*tensor.shape[:-2], grid[-2] * FP8_BLOCK, grid[-1] * FP8_BLOCK), np.float32)
            padded[..., :rows, :columns] = np.abs(values)
            blocks = padded.reshape(*tensor.shape[:-2], grid[-2], FP8_BLOCK, grid[-1], FP8_BLOCK)
            scales = blocks.max(axis=(-3, -1)) / np.float32(448)
            if dtype == "BF16":
                scales = (_bf16(scales).astype(np.uint32) << 16).view(np.float32)
            wide = scales.repeat(FP8_BLOCK, axis=-2).repeat(FP8_BLOCK, axis=-1)[..., :rows, :columns]
        return _e4m3(np.clip(values / wide, -448, 448)), scales

    return [
        Stored(tensor.name, tensor.shape, "F8_E4M3", lambda: split()[0].tobytes()),
        Stored(tensor.name + "_scale_inv", grid, dtype, lambda: _encode(split()[1], dtype)),
    ]


def stored(tensors: list[Tensor], dtype: str) -> Iterator[Stored]:
    """The tensors of a plan as a checkpoint of `dtype` holds them."""
    for tensor in tensors:
        if dtype == "fp8" and _FP8.fullmatch(tensor.name):
            yield from _as_fp8(tensor)
        else:
            kind = "I64" if tensor.integer else DTYPES[dtype]
            yield Stored(tensor.name, tensor.shape, kind, lambda t=tensor, k=kind: _encode(t.make(), k))  # type: ignore[misc]


def safetensors_header(tensors: list[Stored]) -> bytes:
    """What stands before the tensors in a file, its length included."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        place = [position, position + tensor.bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": place}
        position += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_safetensors(path: Path, tensors: list[Stored]) -> int:
    """Writes one file, a tensor at a time, and returns the bytes of its tensors."""
    with path.open("wb") as file:
        file.write(safetensors_header(tensors))
        for tensor in tensors:
            data = tensor.data()
            assert len(data) == tensor.bytes, (tensor.name, len(data), tensor.shape)
            file.write(data)
    return sum(tensor.bytes for tensor in tensors)


def _shares(tensors: list[Stored], shards: int) -> Iterator[list[Stored]]:
    for shard in range(shards):
        yield tensors[len(tensors) * shard // shards : len(tensors) * (shard + 1) // shards]


def config_json(config: TinyConfig, *, prefix: str, dtype: str, mtp: bool) -> dict[str, object]:
    """The values of `config.json`."""
    nested = prefix == "model.language_model."
    text = {**config.text_config(mtp=mtp), "dtype": _CONFIG_DTYPES[dtype]}
    if nested:
        whole: dict[str, object] = {
            "model_type": "qwen4_exp",
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "tie_word_embeddings": config.tie_word_embeddings,
            "text_config": text,
        }
    else:
        whole = {"architectures": ["Qwen4ExpForCausalLM"], **text}
    if dtype == "fp8":
        block = [FP8_BLOCK, FP8_BLOCK]
        whole["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        }  # fmt: skip
    return whole


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
    `dtype="fp8"` writes experts, projections and n-gram rows as E4M3 with scales, the rest as bf16.
    """
    if tokenizer and config.eos_token_id != ENDOFTEXT:
        raise ValueError(f"with a tokenizer eos_token_id is {ENDOFTEXT} (<|endoftext|>), not {config.eos_token_id}")
    path = Path(path)
    path.mkdir(parents=True)
    whole = config_json(config, prefix=prefix, dtype=dtype, mtp=mtp)
    (path / "config.json").write_text(json.dumps(whole, indent=2))
    eos = [IM_END, ENDOFTEXT] if tokenizer else config.eos_token_id
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "do_sample": False}, indent=2))
    tensors = list(stored(plan_tensors(config, seed, layout, prefix, mtp), dtype))
    if shards == 1:
        _write_safetensors(path / "model.safetensors", tensors)
    else:
        total, weight_map = 0, {}
        for number, share in enumerate(_shares(tensors, shards), 1):
            file = f"model-{number:05}-of-{shards:05}.safetensors"
            total += _write_safetensors(path / file, share)
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
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="demo fits q4g64; tiny does not")
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
