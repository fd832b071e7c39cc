"""What resident-only routing costs and saves: the text after a prompt, against the same prompt read exactly.

    python -m bench.prefill_routing PACK --tokens held_out.u16.xz --out bench/results/prefill_routing.json

For each share of the experts: a cache of that size is warmed as a lane warms it (its own policy, over other text read
exactly), then held. Each prompt is read twice from an empty state, exactly and steered; the true text goes on behind
it with ordinary routing both times. Reported: perplexity of that text, agreement of its most likely tokens, greedy
answers (equal tokens before the first difference, and those that are equal throughout), choices replaced, and expert
bytes that had to come from outside the cache while the prompt was read. Without --tokens ids are random: then figures
say only that the path works.

Letters: T tokens that go on, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.quality import FileRecords
from bench.result import frame, write
from bench.token_file import read_token_file
from lanes.counters import Counters
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.policy import Budget, Plan, State, Touched
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.models.near import Near
from lanes.state.pool import StatePool
from lanes.window import Window
from shared_experts.pack import Pack


@dataclass
class Held:
    """The lane's policy until it is held: from then on residency stays."""

    holds: bool = False

    def __call__(self, state: State, touched: Touched, budget: Budget) -> tuple[State, Plan]:
        """A `Policy`."""
        if self.holds:
            return state, Plan(touched.keys[:0], touched.keys[:0])
        return adaptive(state, touched, budget)


class Rig:
    """A model of a pack with a cache of some size."""

    def __init__(self, pack: Pack, budget_bytes: int, threads: int, chunk: int, most_tokens: int) -> None:
        info = pack.manifest.experts
        self.counters, self.policy, self.chunk = Counters(), Held(), chunk
        self.records = FileRecords(pack)
        self.kernel = ExpertKernel(info.layout, threads=threads)
        self.cache = ExpertCache(self.records, info, budget_bytes, self.policy, self.counters)
        self.store = ExpertStore(self.kernel, self.cache, self.counters)
        self.model = load_model(pack, self.store)
        self.model.near = Near(lambda layer: torch.from_numpy(self.cache.resident[layer]), self.counters)
        shape = self.model.state_shape
        self.pool = StatePool(shape, 2 * shape.bytes(most_tokens), slots=2)
        self.most_tokens = most_tokens

    def rows(self, ids: Sequence[int], slot: int, *, steered: bool = False, logits: str = "last") -> torch.Tensor:
        """The next tokens of a sequence, in chunks; logits of the last window."""
        start, out = self.pool[slot].length, torch.empty(0)
        for first in range(0, len(ids), self.chunk):
            part = list(ids[first : first + self.chunk])
            window = Window.of_sequence(part, start + first, slot, logits=logits, steered=steered)
            out = self.model.forward(window, self.pool)
            self.store.end_window()
        return out


@dataclass
class Sums:
    """Over all prompts of one share."""

    nats: dict[str, list[float]] = field(default_factory=lambda: {"exact": [], "vram": []})
    agree: list[bool] = field(default_factory=list)
    common: list[int] = field(default_factory=list)
    missed_bytes: dict[str, int] = field(default_factory=lambda: {"exact": 0, "vram": 0})


def one(rig: Rig, prompt: Sequence[int], following: Sequence[int], answer_tokens: int, sums: Sums) -> None:
    """A prompt, read both ways, and what follows."""
    tops, answers = [], []
    for name in ("exact", "vram"):
        slot = rig.pool.open(rig.most_tokens)
        before = rig.counters.expert_miss_bytes
        logits = rig.rows(prompt, slot, steered=name == "vram")
        sums.missed_bytes[name] += rig.counters.expert_miss_bytes - before
        greedy = rig.pool.open(rig.most_tokens)
        rig.rows(prompt, greedy, steered=name == "vram")
        rest = rig.rows(following[:-1], slot, logits="all")
        rows = torch.cat((logits, rest)).log_softmax(-1)  # [T, V]
        sums.nats[name] += (-rows.gather(1, torch.tensor(following)[:, None])[:, 0]).tolist()
        tops.append(rows.argmax(-1))
        ids, row = list[int](), logits
        while len(ids) < answer_tokens:
            ids.append(int(row[-1].argmax()))
            row = rig.rows(ids[-1:], greedy)
        answers.append(ids)
        rig.pool.close(greedy)
        rig.pool.close(slot)
    sums.agree += (tops[0] == tops[1]).tolist()
    sums.common.append(next((at for at, (a, b) in enumerate(zip(*answers, strict=True)) if a != b), answer_tokens))


def measure(pack: Pack, share: float, ids: np.ndarray, options: argparse.Namespace) -> dict[str, object]:
    """One share of the experts."""
    info = pack.manifest.experts
    layers = info.layers - info.draft_layers  # a draft layer is not read here
    span = options.prompt_tokens + options.next_tokens
    rig = Rig(
        pack, math.ceil(share * layers * info.experts) * info.record_bytes, options.threads, options.chunk,
        max(span, options.prompt_tokens + options.answer_tokens + 1, options.warm_tokens),
    )  # fmt: skip
    slot = rig.pool.open(options.warm_tokens)
    rig.rows(ids[: options.warm_tokens].tolist(), slot)
    rig.pool.close(slot)
    rig.policy.holds = True
    rig.counters.restart()
    sums = Sums()
    for number in range(options.prompts):
        at = options.warm_tokens + number * span
        text = ids[at : at + span].tolist()
        one(rig, text[: options.prompt_tokens], text[options.prompt_tokens :], options.answer_tokens, sums)
    rig.kernel.close()
    perplexity = {name: math.exp(float(np.mean(nats))) for name, nats in sums.nats.items()}
    resident = float(rig.cache.resident[:layers].mean())
    return {
        "share": share,
        "resident": round(resident, 4),
        "perplexity": {name: round(value, 4) for name, value in perplexity.items()},
        "perplexity_ratio": round(perplexity["vram"] / perplexity["exact"], 4),
        "next_token_agreement": round(float(np.mean(sums.agree)), 4),
        "greedy_tokens_before_a_difference_mean": round(float(np.mean(sums.common)), 2),
        "greedy_answers_equal": round(float(np.mean([c == options.answer_tokens for c in sums.common])), 4),
        "choices_replaced": round(rig.counters.replaced_choices / max(1, rig.counters.prompt_choices), 4),
        "missed_bytes": sums.missed_bytes,
        "bytes_saved": round(1 - sums.missed_bytes["vram"] / max(1, sums.missed_bytes["exact"]), 4),
    }


def read_tokens(path: Path | None, needed: int, vocab: int) -> np.ndarray:
    """uint16 ids of a file (`.xz` or plain), or random ones."""
    if path is None:
        return np.random.default_rng(5).integers(0, vocab, needed)
    ids = read_token_file(path)
    if len(ids) < needed:
        raise SystemExit(f"{path}: {len(ids)} tokens, {needed} are needed")
    return ids[:needed]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill_routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--tokens", type=Path, help="held-out text as uint16 ids, .xz or plain (default: random ids)")
    parser.add_argument("--shares", default="0.1,0.25,0.5", help="of the experts resident (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each (default: %(default)s)")
    parser.add_argument("--next-tokens", type=int, default=64, help="that go on (default: %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="drawn greedily (default: %(default)s)")
    parser.add_argument("--warm-tokens", type=int, default=4096, help="read first, exactly (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=256, help="rows of a window (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write the result there")
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    needed = options.warm_tokens + options.prompts * (options.prompt_tokens + options.next_tokens)
    with Pack.open(options.pack) as pack:
        info, name = pack.manifest.experts, pack.manifest.name
        ids = read_tokens(options.tokens, needed, int(str(pack.manifest.config["vocab_size"])))
        shares = [measure(pack, float(share), ids, options) for share in options.shares.split(",")]
        facts = {"name": name, "experts": info.format, "layers": info.layers, "experts_per_layer": info.experts}
    conditions = {
        name: value for name, value in vars(options).items() if name not in ("pack", "out", "tokens", "shares")
    } | {"text": options.tokens.name if options.tokens else "random ids"}
    shown = [word for word in arguments if "/" not in word]
    result = frame("bench.prefill_routing", ["PACK", *shown], pack=facts, conditions=conditions, packages=("torch",))
    write(result | {"shares": shares}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
