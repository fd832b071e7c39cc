"""How well a layer's routing can be guessed before it is computed: what a prefetch of experts could build on.

    python -m bench.next_experts PACK --tokens held_out.u16.xz --first 20000

Text is read once by the CPU model. For every layer but the first its router is also applied to what was known earlier:

    choice      what the layer in front chose its experts by (known a whole layer early)
    attention   what this layer's attention or DeltaNet sees (known before the dense half of the layer)
    mixed       the streams behind the layer in front, through this layer's own mixer (the same time, one mixer more)

Of the K greatest scores of each: how many of the K that were chosen are among them, and the same for experts outside a
cache that holds the hottest ones of the text's first half. Not here: whether copying them ahead pays (docs/adr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.prefill_routing import Rig
from bench.result import frame, write
from bench.token_file import read_token_file
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.stream import Connected, Mixer
from shared_experts.pack import Pack

CHUNK_TOKENS = 256


class Heard:
    """A mixer that keeps the streams it was given and the vector that it made of them."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self._streams: list[torch.Tensor] = []
        self._vectors: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As the mixer."""
        u, injection = self.mixer(x)
        self._streams.append(x.clone())
        self._vectors.append(u.clone())
        return u, injection

    @property
    def streams(self) -> torch.Tensor:
        """[T, S, H]."""
        return torch.cat(self._streams)

    @property
    def vectors(self) -> torch.Tensor:
        """[T, H]."""
        return torch.cat(self._vectors)


def chosen(scores: torch.Tensor, k: int) -> torch.Tensor:
    """bool [T, E]: the k greatest of each row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(k, dim=1).indices, True)


def hottest(used: torch.Tensor, share: float) -> torch.Tensor:
    """bool [E]: the fewest experts that take that share of used bool [T, E]."""
    counts = used.sum(0)
    order = counts.argsort(descending=True)
    count = int((counts[order].cumsum(0) < share * counts.sum()).sum()) + 1
    held = torch.zeros(len(counts), dtype=torch.bool)
    held[order[:count]] = True
    return held


def recalled(model: Qwen4Exp, heard: Sequence[tuple[Heard, Heard]], k: int, share: float) -> dict[str, Any]:
    """By what a guess is made of: means over layers; heard (attention, experts) of every layer."""
    moes = [b.block for b in model.blocks if isinstance(b, Connected) and isinstance(b.block, Moe)]
    found: dict[str, list[tuple[float, float, float]]] = {}
    for layer in range(1, len(heard)):
        attention, experts = heard[layer]
        router = moes[layer].router[:-1]
        made = {
            "choice": heard[layer - 1][1].vectors,
            "attention": attention.vectors,
            "mixed": experts.mixer(attention.streams)[0],
        }
        truth = chosen(experts.vectors @ router.T, k)
        half = len(truth) // 2
        outside = ~hottest(truth[:half], share)
        right = truth[half:]
        for name, u in made.items():
            guess = chosen(u @ router.T, k)[half:]
            missed, guessed = right & outside, guess & outside
            both = float((missed & guessed).sum())
            found.setdefault(name, []).append(
                (
                    float((right & guess).sum() / right.sum()), both / max(1, int(missed.sum())),
                    both / max(1, int(guessed.sum())),
                )
            )  # fmt: skip
    names = ("recall", "recall_outside_the_cache", "right_outside_the_cache")
    return {
        guess: dict(zip(names, np.array(layers).mean(0).round(3).tolist(), strict=True))
        for guess, layers in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.next_experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="a file of token ids")
    parser.add_argument("--first", type=int, default=0, help="where in the file (default: %(default)s)")
    parser.add_argument("--count", type=int, default=3000, help="tokens that are read (default: %(default)s)")
    parser.add_argument("--hits", type=float, default=0.75, help="what the cache hits of the first half")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    ids = np.asarray(read_token_file(options.tokens))[options.first : options.first + options.count].tolist()
    with Pack.open(options.pack) as pack:
        rig = Rig(pack, 0, options.threads, CHUNK_TOKENS, len(ids))
        assert isinstance(rig.model, Qwen4Exp)
        pairs = [b for b in rig.model.blocks if isinstance(b, Connected)]
        for block in pairs:
            block.mixer = Heard(block.mixer)  # type: ignore[assignment]
        rig.rows(ids, rig.pool.open(len(ids)))
        mixers = [block.mixer for block in pairs]
        heard = list(zip(mixers[::2], mixers[1::2], strict=True))
        k = rig.model.spec.experts_per_token
        found = recalled(rig.model, heard, k, options.hits)  # type: ignore[arg-type]
        rig.kernel.close()
        info = {"name": pack.manifest.name, "experts": pack.manifest.experts.experts, "chosen": k, "layers": len(heard)}
    conditions = {"tokens": len(ids), "hits_of_the_first_half": options.hits}
    write({**frame("bench.next_experts", argv, pack=info, conditions=conditions), **found}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
