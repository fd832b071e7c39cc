"""A trained model as a Hugging Face directory, and as parts that are small enough to be moved about.

The checkpoint is bf16 (or f32 for tests), one safetensors file, experts and n-gram table fused. Parts hold the same
files without loss in about 0.7 of the bytes: high and low bytes of bf16 weights apart, then Huffman codes. Not here:
training states (`states`), packs (`expressway pack`).

    python -m deploy.demo_model.export parts CHECKPOINT PARTS
    python -m deploy.demo_model.export join PARTS CHECKPOINT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.tiny_model import TinyConfig
from deploy.demo_model.model.network import Network
from deploy.demo_model.tokenizer import ENDOFTEXT, IM_END

WEIGHTS = "model.safetensors"
PART_BYTES = 15 << 20
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_BUFFERS = (".layer_multipliers", ".ngram_heads_offsets", ".ngram_heads_vocab_sizes")


def write_checkpoint(
    folder: Path,
    config: TinyConfig,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a checkpoint directory; `tokenizer` is a folder that holds the tokenizer's three files."""
    folder.mkdir(parents=True)
    kind = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[dtype]
    whole = {"architectures": ["Qwen4ExpForCausalLM"], **config.text_config(mtp=True), "dtype": kind}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    ends = {"eos_token_id": [IM_END, ENDOFTEXT], "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    stored = {
        name: (value.detach().cpu() if name.endswith(_BUFFERS) else value.detach().to("cpu", dtype)).contiguous()
        for name, value in sorted(weights.items())
    }
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None:
        for name in _TOKENIZER:
            shutil.copyfile(tokenizer / name, folder / name)
    return folder


def read_config(folder: Path) -> TinyConfig:
    """The sizes of a checkpoint that this recipe wrote."""
    values = json.loads((folder / "config.json").read_text())
    rope = values["rope_parameters"]
    named = {name: values[name] for name in TinyConfig.__dataclass_fields__ if name in values}
    lists = {name: tuple(named[name]) for name in ("layer_types", "ple_layer_ids")}
    return TinyConfig(
        **{**named, **lists},
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        mrope_section=tuple(rope["mrope_section"]),
    )


def read_network(folder: Path) -> Network:
    """The model of a checkpoint that this recipe wrote, in fp32."""
    network = Network(read_config(folder))
    network.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in read_weights(folder).items()})
    return network


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as they are stored."""
    return load_file(folder / WEIGHTS)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_parts(checkpoint: Path, parts: Path) -> None:
    """Writes `parts/part-NN.z`, each of at most PART_BYTES, and `parts/index.json`, which has the digests."""
    parts.mkdir(parents=True)
    data = np.frombuffer((checkpoint / WEIGHTS).read_bytes(), np.uint8)
    even = data[: data.size // 2 * 2].reshape(-1, 2)
    planes = np.concatenate((even[:, 1], even[:, 0], data[even.size :])).tobytes()
    packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)  # LZMA: 0.5 % less in fifty times as long
    packed = packer.compress(planes) + packer.flush()
    names: list[str] = []
    for first in range(0, len(packed), PART_BYTES):
        names.append(f"part-{len(names):02}.z")
        (parts / names[-1]).write_bytes(packed[first : first + PART_BYTES])
    small = {p.name: p.read_text() for p in sorted(checkpoint.iterdir()) if p.name != WEIGHTS}
    index = {"sha256": digest(checkpoint / WEIGHTS), "bytes": data.size, "parts": names, "files": small}
    (parts / "index.json").write_text(json.dumps(index))


def join_parts(parts: Path, checkpoint: Path) -> None:
    """Gives the checkpoint back; ValueError when it is not what was written."""
    index = json.loads((parts / "index.json").read_text())
    planes = np.frombuffer(zlib.decompress(b"".join((parts / n).read_bytes() for n in index["parts"])), np.uint8)
    half = planes.size // 2
    data = np.concatenate((np.stack((planes[half : 2 * half], planes[:half]), 1).reshape(-1), planes[2 * half :]))
    if hashlib.sha256(data.tobytes()).hexdigest() != index["sha256"]:
        raise ValueError(f"{parts}: the joined weights have another digest")
    checkpoint.mkdir(parents=True)
    (checkpoint / WEIGHTS).write_bytes(data.tobytes())
    for name, text in index["files"].items():
        if name != Path(name).name:
            raise ValueError(f"{parts}: {name!r} is no file name")
        (checkpoint / name).write_text(text)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo_model.export", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=("parts", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    (write_parts if options.what == "parts" else join_parts)(options.source, options.target)


if __name__ == "__main__":
    main()
