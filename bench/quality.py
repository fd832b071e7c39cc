"""`python -m bench.quality`: what quantised experts cost, as KL divergence from the same model with f32 experts.

Teacher-forced over random tokens, dense weights f32 everywhere, so that experts are the only difference. Each format is
measured as served (native kernel, int8 activations) and with exact activations; and one layer at a time on the f32
model's own inputs, which says how large the error is before the model multiplies it. Random checkpoints have small
margins and sharp routers, and eight such layers nearly forget what was perturbed: a row "unrelated" (the answer to the
token before) says where KL saturates. Figures rank formats, they do not predict a trained model's.

Letters: T tokens, V vocabulary, R rows, H hidden, K experts per row.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from bench.checkpoint import PRESETS, write_checkpoint
from bench.result import frame, write
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.naive import NaiveExperts
from lanes.experts.native import ExpertKernel
from lanes.experts.protocol import Experts
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.convert import convert
from shared_experts.layout import EXPERT_FORMATS, record_offset
from shared_experts.pack import Pack

FORMATS = ("q8", "q4g64", "q4g32")
CHUNK_ROWS = 256
CASES = (("demo", 2), ("demo", 8), ("tiny", 8))  # preset, layers


class FileRecords:
    """The records of a pack's file, mapped: a region without a region."""

    def __init__(self, pack: Pack) -> None:
        self._info = pack.manifest.experts
        with pack.experts_path.open("rb") as file:
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def record(self, layer: int, expert: int) -> memoryview:
        """The bytes of one record."""
        at = record_offset(layer, expert, self._info.experts, self._info.record_bytes)
        return self._bytes[at : at + self._info.record_bytes].data

    def record_address(self, layer: int, expert: int) -> int:
        """Where they lie."""
        at = record_offset(layer, expert, self._info.experts, self._info.record_bytes)
        return int(self._bytes.ctypes.data) + at


@dataclass
class Compared:
    """Answers as `truth` does and measures what `other` would have answered to the same rows."""

    truth: Experts
    other: Experts
    error: float = 0.0
    size: float = 0.0

    def expect(self, layer: int, ids: torch.Tensor) -> None:
        """As lanes.experts.protocol.Experts."""
        self.truth.expect(layer, ids)
        self.other.expect(layer, ids)

    def forward(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As lanes.experts.protocol.Experts."""
        out = self.truth.forward(layer, x, ids, weights)
        self.error += float((self.other.forward(layer, x, ids, weights) - out).square().sum())
        self.size += float(out.square().sum())
        return out

    @property
    def relative(self) -> float:
        """Root mean square error over root mean square."""
        return math.sqrt(self.error / self.size)


@dataclass
class Divergence:
    """Sums over tokens of one comparison with the f32 model."""

    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def add(self, truth: torch.Tensor, other: torch.Tensor) -> None:
        """Logits [T, V] of both."""
        p, q = truth.double().log_softmax(-1), other.double().log_softmax(-1)
        self.kl += (p.exp() * (p - q)).sum(-1).tolist()
        self.agree += (truth.argmax(-1) == other.argmax(-1)).tolist()

    def summary(self) -> dict[str, float]:
        """Mean and median KL in nats, and the share of equal greedy tokens."""
        return {
            "kl_mean_nats": round(float(np.mean(self.kl)), 6),
            "kl_median_nats": round(float(np.median(self.kl)), 6),
            "top1_agreement": round(float(np.mean(self.agree)), 4),
        }


@contextlib.contextmanager
def opened(source: Path, folder: Path, experts: str) -> Iterator[tuple[Pack, dict[str, Experts]]]:
    """A pack of `source` and its experts: "as_served" and "exact_activations"."""
    target = folder / f"{source.name}.{experts}.pack"
    convert(source, target, experts=experts, dense="f32", threads=1)
    with Pack.open(target) as pack, contextlib.ExitStack() as stack:
        info, records, counters = pack.manifest.experts, FileRecords(pack), Counters()
        kernel = ExpertKernel(info.layout, threads=1)
        stack.callback(kernel.close)
        cache = ExpertCache(records, info, 0, adaptive, counters)
        yield (
            pack,
            {
                "as_served": ExpertStore(kernel, cache, counters),
                "exact_activations": NaiveExperts(info.layout, records.record),
            },
        )


def logits(pack: Pack, experts: Experts, ids: list[int]) -> torch.Tensor:
    """Teacher-forced logits [T, V]."""
    model = load_model(pack, experts)
    pool = StatePool(model.state_shape, model.state_shape.bytes(len(ids)))
    slot = pool.open(len(ids))
    return torch.cat(
        [
            model.forward(Window.of_sequence(ids[at : at + CHUNK_ROWS], at, slot, logits="all"), pool)
            for at in range(0, len(ids), CHUNK_ROWS)
        ]
    )


def measure(preset: str, layers_count: int, seeds: int, tokens: int, folder: Path) -> dict[str, object]:
    """Every format that fits the preset, over `seeds` checkpoints of `tokens` tokens each."""
    kinds = None if layers_count >= 4 else ("linear_attention",) * (layers_count - 1) + ("full_attention",)
    config = replace(PRESETS[preset], num_hidden_layers=layers_count, layer_types=kinds, ple_layer_ids=(1,))
    group = {name: EXPERT_FORMATS[name].group for name in FORMATS}
    formats = [f for f in FORMATS if config.hidden_size % group[f] == config.moe_intermediate_size % group[f] == 0]
    found = {(f, how): Divergence() for f in ("f32", *formats) for how in ("as_served", "exact_activations")}
    unrelated = Divergence()
    layers: dict[tuple[str, str], list[float]] = {key: [] for key in found}
    margins: list[float] = []
    for seed in range(seeds):
        source = write_checkpoint(folder / f"{preset}-{layers_count}-{seed}", config, seed, tokenizer=False, mtp=False)
        ids = np.random.default_rng(seed).integers(10, config.vocab_size, tokens).tolist()
        with opened(source, folder, "f32") as (pack, exact):
            truth = logits(pack, exact["exact_activations"], ids)
            unrelated.add(truth[1:], truth[:-1])
            top = truth.topk(2, dim=-1).values
            margins += (top[:, 0] - top[:, 1]).tolist()
            found["f32", "as_served"].add(truth, logits(pack, exact["as_served"], ids))
            for name in formats:
                with opened(source, folder, name) as (small_pack, small):
                    for how, experts in small.items():
                        compared = Compared(exact["exact_activations"], experts)
                        logits(pack, compared, ids)
                        layers[name, how].append(compared.relative)
                        found[name, how].add(truth, logits(small_pack, experts, ids))
    rows = [
        {
            "experts": name,
            "how": how,
            **divergence.summary(),
            **({"layer_error": round(float(np.mean(layers[name, how])), 4)} if layers[name, how] else {}),
        }
        for (name, how), divergence in found.items()
        if divergence.kl
    ]
    return {
        "preset": preset,
        "hidden": config.hidden_size,
        "intermediate": config.moe_intermediate_size,
        "layers": config.num_hidden_layers,
        "experts_per_token": f"{config.num_experts_per_tok} of {config.num_experts}",
        "unrelated": unrelated.summary(),
        "median_top1_margin": round(float(np.median(margins)), 3),
        "rows": rows,
    }


def main() -> None:
    """Runs the presets and writes one result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tables = [measure(*case, chosen.seeds, chosen.tokens, Path(folder)) for case in CASES]
    arguments = ["--seeds", str(chosen.seeds), "--tokens", str(chosen.tokens)]
    result = frame(
        "bench.quality",
        arguments + (["--out", str(chosen.out)] if chosen.out else []),
        pack={"values": "random checkpoints", "dense": "f32", "formats": ["f32", *FORMATS]},
        conditions={"seeds": chosen.seeds, "tokens_per_seed": chosen.tokens, "reference": "f32 experts, naive twin"},
        packages=("torch", "numpy"),
    )
    write({**result, "tables": tables}, chosen.out)


if __name__ == "__main__":
    main()
