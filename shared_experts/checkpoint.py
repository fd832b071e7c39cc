"""A Hugging Face checkpoint directory of `qwen4_exp`, opened, checked and read piece by piece.

`Checkpoint.open` reads config, index and headers only, gives every tensor its canonical name and checks names, shapes
and dtypes against the config; after that, reading is positioned and bounded. Not here: writing (`convert`).

Invariant: an open `Checkpoint` has every tensor its config needs, once and in the right shape, and nothing unknown.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shared_experts import limits
from shared_experts.errors import CheckpointError
from shared_experts.fields import Fields, parse_json, plain, plain_name
from shared_experts.qwen4_exp import NgramConstants, TextConfig
from shared_experts.safetensors_reader import SafetensorsFile, open_regular
from shared_experts.tensor_source import FLOATS, FP8, NgramSource, Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXTRA_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

_NUMBER = r"(0|[1-9]\d{0,5})"
_EXPERT = re.compile(
    rf"(model|mtp)\.layers\.{_NUMBER}\.mlp\.experts\.(?:{_NUMBER}\.(gate|up|down)_proj\.weight|(gate_up_proj|down_proj))"
)
_NGRAM = re.compile(
    rf"model\.layers\.{_NUMBER}\.ple\.ple_embedding\.(?:ngram_embedding\.(?:shard_{_NUMBER}\.)?weight"
    r"|(layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes))"
)
_VISION = "model.visual."
_SCALE = "_scale_inv"
FP8_BLOCK = (128, 128)


class Checkpoint:
    """An open, checked checkpoint; close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.text, self._fp8 = _read_config(path)
        self._files = _open_files(path)
        for file in self._files:
            file.bypass_cache()
        try:
            self._sort()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Opens and checks a directory; raises CheckpointError."""
        return cls(Path(path))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes every shard."""
        for file in self._files:
            file.close()

    @property
    def expert_layers(self) -> int:
        """Layers with experts, draft layers included."""
        return len(self.text.layers) + self.draft_layers

    def expert_runs(self, layer: int, expert: int) -> Iterator[tuple[int, int, Source, int, int]]:
        """(matrix, its first row, source, first element, rows) of the runs that make up an expert.

        Matrix 0 is gate and up [2I, H], matrix 1 down [H, I].
        """
        hidden, inner = self.text.hidden, self.text.intermediate
        found, size = self._experts[layer], hidden * inner
        if "gate_up_proj" in found:
            yield 0, 0, found["gate_up_proj"], expert * 2 * size, 2 * inner
            yield 1, 0, found["down_proj"], expert * size, hidden
        else:
            yield 0, 0, found[f"{expert}.gate"], 0, inner
            yield 0, inner, found[f"{expert}.up"], 0, inner
            yield 1, 0, found[f"{expert}.down"], 0, hidden

    def identity(self) -> str:
        """A digest of what a conversion depends on: every small file's bytes, every large one's name, size and time."""
        lines = []
        for file in self._files:
            status = os.fstat(file.descriptor)
            lines.append(f"{file.path.name} {status.st_size} {status.st_mtime_ns} {file.header_sha256}")
        small = [self.path / "config.json", self.path / INDEX, *self.extra_files()]
        for path in small:
            if path.exists():
                digest = hashlib.sha256(read_small(path, limits.EXTRA_FILE_BYTES)).hexdigest()
                lines.append(f"{path.name} {digest}")
        return hashlib.sha256("".join(line + "\n" for line in lines).encode()).hexdigest()

    def extra_files(self) -> list[Path]:
        """Tokenizer and other small files that a pack carries along, those that exist."""
        names = [name for name in EXTRA_FILES if (self.path / name).exists()]
        names += sorted(p.name for p in self.path.glob("chat_template*") if p.is_file())
        return [self.path / name for name in names[: limits.EXTRA_FILES]]

    def _sort(self) -> None:
        """Gives every tensor its place; refuses what has none and what is missing."""
        by_name: dict[str, Source] = {}
        for file in self._files:
            for info in file.tensors.values():
                if info.name.startswith(_VISION):
                    continue
                source, name = Source(file, info), canonical(info.name)
                if name in by_name:
                    other = by_name[name]
                    raise source.error(f"is there twice: also as {other.info.name!r} in {other.file.path.name}")
                by_name[name] = source
        self._scales = {name: by_name.pop(name) for name in list(by_name) if name.endswith(_SCALE)}
        self.draft_layers = self._count_draft_layers(by_name)
        has_head = "lm_head.weight" in by_name
        if not has_head and not self.text.tied:
            raise CheckpointError(self.path, "is missing, and the config does not tie it", tensor="lm_head.weight")
        self.text = replace(self.text, tied=not has_head)
        self.config = {**self.config, "tie_word_embeddings": not has_head}
        self.dense = {}
        for name, shape in self.text.dense_shapes(self.draft_layers, head=has_head).items():
            self.dense[name] = self._take(by_name, name, shape)
        self._experts = [self._take_experts(by_name, layer) for layer in range(self.expert_layers)]
        self.ngram = {layer: self._take_ngram(by_name, layer) for layer in self.text.ple_layers}
        for source in by_name.values():
            expert, ngram = (
                _EXPERT.fullmatch(canonical(source.info.name)),
                _NGRAM.fullmatch(canonical(source.info.name)),
            )
            known = (
                "does not fit the config: too many of its kind, or a second layout"
                if expert or ngram
                else "unknown name"
            )
            raise source.error(known)
        for source in self._scales.values():
            raise source.error(f"is no scale of an {FP8} tensor that the config names")

    def _count_draft_layers(self, by_name: dict[str, Source]) -> int:
        numbers = [int(m[1]) for name in by_name if (m := re.match(rf"mtp\.layers\.{_NUMBER}\.", name))]
        count = max(numbers, default=-1) + 1
        if count == 0 and any(name.startswith("mtp.") for name in by_name):
            count = 1
        if count > limits.DRAFT_LAYERS or (count and self.text.draft_layers not in (None, count)):
            first = next(name for name in by_name if name.startswith("mtp."))
            raise by_name[first].error(f"{count} draft layers, the config says {self.text.draft_layers}")
        return count

    def _take(
        self, by_name: dict[str, Source], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = (*FLOATS, FP8)
    ) -> Source:
        source = by_name.pop(name, None)
        if source is None:
            raise CheckpointError(self.path, "is missing", tensor=name)
        if source.info.shape != shape:
            raise source.error(f"has shape {list(source.info.shape)}, the config wants {list(shape)}")
        if source.info.dtype not in dtypes:
            raise source.error(f"has dtype {source.info.dtype}, wanted {' or '.join(dtypes)}")
        return self._scaled(source, name) if source.info.dtype == FP8 else source

    def _scaled(self, source: Source, name: str, table: str | None = None) -> Source:
        """An FP8 tensor with its scales: one per block, or one in all for (the shards of) the n-gram table `table`."""
        shape = source.info.shape
        if not self._fp8:
            raise source.error(f"has dtype {FP8}, but config.json has no quantization_config that says so")
        if len(shape) < 2:
            raise source.error(f"has dtype {FP8} and shape {list(shape)}; only matrices have scales")
        scale = self._scales.pop(name + _SCALE, None)
        if scale is None and table is not None:
            scale = self._scales.get(table + _SCALE)
        if scale is None:
            raise source.error(f"has dtype {FP8}, and its {name.rpartition('.')[2] + _SCALE} is missing")
        if scale.info.dtype not in ("F32", "BF16"):
            raise scale.error(f"has dtype {scale.info.dtype}, wanted F32 or BF16")
        rows, columns = FP8_BLOCK
        grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
        if table is not None and scale.elements == 1 and scale.info.shape in ((), (1,), (1, 1)):
            return replace(source, scale=scale, block=(shape[0], shape[1]))
        if scale.info.shape != grid:
            raise scale.error(f"has shape {list(scale.info.shape)}, blocks of {rows} x {columns} need {list(grid)}")
        return replace(source, scale=scale, block=FP8_BLOCK)

    def _take_experts(self, by_name: dict[str, Source], layer: int) -> dict[str, Source]:
        at, hidden, inner, experts = (
            self.text.expert_prefix(layer),
            self.text.hidden,
            self.text.intermediate,
            self.text.experts,
        )
        if f"{at}.gate_up_proj" in by_name or f"{at}.down_proj" in by_name:
            fused = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
            return {name: self._take(by_name, f"{at}.{name}", shape) for name, shape in fused.items()}
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return {
            f"{expert}.{part}": self._take(by_name, f"{at}.{expert}.{part}_proj.weight", shape)
            for expert in range(experts)
            for part, shape in shapes.items()
        }

    def _take_ngram(self, by_name: dict[str, Source], layer: int) -> NgramSource:
        at = f"model.layers.{layer}.ple.ple_embedding"
        constants = self._take_constants(by_name, at, layer)
        rows, columns = self.text.ngram_rows(constants), self.text.ngram_columns
        whole = f"{at}.ngram_embedding.weight"
        if whole in by_name:
            return NgramSource((self._take_rows(by_name, whole, whole, (rows, columns)),), rows, columns, constants)
        parts: list[Source] = []
        while (name := f"{at}.ngram_embedding.shard_{len(parts)}.weight") in by_name:
            shape = by_name[name].info.shape
            parts.append(self._take_rows(by_name, name, whole, (shape[0] if shape else 0, columns)))
        found = sum(part.info.shape[0] for part in parts)
        if not parts or found != rows:
            reason = f"its {len(parts)} shards have {found} rows, the config wants {rows}" if parts else "is missing"
            raise CheckpointError(self.path, reason, tensor=whole)
        if any(part.scale is self._scales.get(whole + _SCALE) for part in parts if part.scale is not None):
            del self._scales[whole + _SCALE]
        return NgramSource(tuple(parts), rows, columns, constants)

    def _take_rows(self, by_name: dict[str, Source], name: str, table: str, shape: tuple[int, int]) -> Source:
        source = by_name.get(name)
        if source is not None and source.info.dtype == FP8 and source.info.shape == shape:
            return self._scaled(by_name.pop(name), name, table)
        return self._take(by_name, name, shape)

    def _take_constants(self, by_name: dict[str, Source], at: str, layer: int) -> NgramConstants:
        heads = self.text.ngram_heads
        sizes = {
            "layer_multipliers": self.text.ngram_size,
            "ngram_heads_offsets": heads,
            "ngram_heads_vocab_sizes": heads,
        }
        present = [name for name in sizes if f"{at}.{name}" in by_name]
        if not present:
            return self.text.ngram_constants(layer)
        values: list[tuple[int, ...]] = []
        for name, size in sizes.items():
            source = self._take(by_name, f"{at}.{name}", (size,), ("I64",))
            values.append(source.integers())
            high = (1 << 63) - 1 if name == "layer_multipliers" else limits.NGRAM_ROWS
            if min(values[-1]) < (0 if name == "ngram_heads_offsets" else 1) or max(values[-1]) > high:
                raise source.error("has a value out of range")
        multipliers, offsets, vocab_sizes = values
        ends = [o + s for o, s in zip(offsets, vocab_sizes, strict=True)]
        if list(offsets) != [0, *ends[:-1]] or ends[-1] > limits.NGRAM_ROWS:
            raise CheckpointError(self.path, "is not the running sum of the sizes", tensor=f"{at}.ngram_heads_offsets")
        return NgramConstants(multipliers, offsets, vocab_sizes)


def canonical(name: str) -> str:
    """The text-only model's name of a tensor: `model.language_model.` becomes `model.`."""
    prefix = "model.language_model."
    return "model." + name[len(prefix) :] if name.startswith(prefix) else name


def read_small(path: Path, most: int) -> bytes:
    """A whole small file; raises CheckpointError where it is larger than `most`."""
    descriptor, size = open_regular(path, lambda reason: CheckpointError(path, reason), follow=True)
    with os.fdopen(descriptor, "rb") as file:
        if size > most:
            raise CheckpointError(path, f"has {size} bytes; at most {most} are read")
        return file.read(size)  # not `most`: read makes room for as much at once


def _read_config(path: Path) -> tuple[dict[str, object], TextConfig, bool]:
    """(the text config, its sizes, whether FP8 tensors are to be expected)."""
    file = path / "config.json"

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(file, reason)

    whole = Fields(parse_json(read_small(file, limits.CONFIG_BYTES), fail), fail)
    plain(whole.values, fail)
    values, inner = dict(whole.values), whole
    if "text_config" in values:
        outer_tied = whole.boolean("tie_word_embeddings", False)
        inner = Fields(values["text_config"], fail, "text_config")
        values = {**inner.values, "tie_word_embeddings": outer_tied or inner.boolean("tie_word_embeddings", False)}
        values.setdefault("model_type", "qwen4_exp_text")
        if whole.text("model_type", 64) != "qwen4_exp":
            raise fail(f"model_type {whole.values['model_type']!r} is not read; known: qwen4_exp")
    values.pop("quantization_config", None)  # the pack is not quantised in this way
    descriptions = [m["quantization_config"] for m in (whole.values, inner.values) if m.get("quantization_config")]
    for description in descriptions:
        _check_quantisation(Fields(description, fail, "quantization_config"))
    fp8 = bool(descriptions)
    return {str(key): value for key, value in values.items()}, TextConfig.parse(values, fail), fp8


def _check_quantisation(read: Fields) -> None:
    """A checkpoint that says it is quantised must be so in the one way that is read."""
    method = read.text("quant_method", 64)
    if method != "fp8":
        read.refuse(f"quantization_config.quant_method {method!r} is not read; known: fp8")
    if read.text("fmt", 64, "e4m3") != "e4m3":
        read.refuse(f"quantization_config.fmt {read.values['fmt']!r} is not read; known: e4m3")
    if tuple(read.integers("weight_block_size", 2, 1, 1 << 16)) != FP8_BLOCK:
        read.refuse(
            f"quantization_config.weight_block_size {read.values['weight_block_size']} is not {list(FP8_BLOCK)}"
        )


def _open_files(path: Path) -> list[SafetensorsFile]:
    if (path / INDEX).exists():
        return _open_indexed(path)
    return [_open(path / SINGLE)]


def _open(file: Path) -> SafetensorsFile:
    return SafetensorsFile(file, lambda reason, tensor=None: CheckpointError(file, reason, tensor=tensor))


def _open_indexed(path: Path) -> list[SafetensorsFile]:
    file = path / INDEX

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(file, reason)

    index = Fields(parse_json(read_small(file, limits.INDEX_BYTES), fail), fail)
    weight_map = Fields(index.values.get("weight_map"), fail, "weight_map").values
    if not weight_map or len(weight_map) > limits.TENSORS:
        raise fail(f"weight_map has {len(weight_map)} tensors; 1..{limits.TENSORS} are read")
    names: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if type(shard) is not str or not plain_name(shard):
            raise CheckpointError(
                file, f"its shard {str(shard)[:80]!r} is not a plain file name", tensor=str(tensor)[:80]
            )
        names.setdefault(shard, set()).add(str(tensor))
    if len(names) > limits.SHARDS:
        raise fail(f"{len(names)} shards; at most {limits.SHARDS} are read")
    opened: list[SafetensorsFile] = []
    try:
        for shard in sorted(names):
            opened.append(_open(path / shard))
            for tensor in sorted(names[shard] ^ opened[-1].tensors.keys()):
                here = "the index puts it here, but it is not" if tensor in names[shard] else "is not in the index"
                raise CheckpointError(path / shard, here, tensor=tensor)
    except BaseException:
        for shard_file in opened:
            shard_file.close()
        raise
    return opened
