"""What drafts bring on a CPU lane, when so many of them are right: the engine, the policy and every cost are real.

Random weights guess nothing right, and their answers change with the last bit of a logit. So everything is computed and
paid for, but what it says is forced: logits are replaced by those of one fixed answer, and an **oracle** replaces the
draft layer's by the answer's next token, or, at a given share of places, by another one. So "80 %" means an injected
acceptance, and the gain is a projection for a draft layer of that quality on this machine. Answers without drafts and
with each share are interleaved; a figure is a median of ratios. On a machine that is shared, `--clock cpu` counts the
process's own time, which neighbours disturb less. Also here: how well two ways of naming a draft meet a temperature.

    python -m bench.drafts --shape wide --rounds 5 --out bench/results/drafts.json

Letters: V vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.checkpoint import PRESETS, write_checkpoint
from bench.quality import FileRecords
from bench.result import frame, write
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.drafts.policy import Beliefs
from lanes.engine import Engine
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.native import ExpertKernel
from lanes.experts.pinned import with_pins
from lanes.experts.store import ExpertStore
from lanes.models import load_model
from lanes.outbox import End, Outbox
from lanes.request import Request, Sampling
from lanes.runner import Likeliest, Logits, ModelRunner
from lanes.sampler import choose
from lanes.state.pool import StatePool
from lanes.window import Meanwhile, Window, nothing
from shared_experts.convert import convert
from shared_experts.pack import Pack

SHARES = (0.0, 0.5, 0.65, 0.8)
PROMPT_TOKENS = 300
CLOCKS = {"wall": time.monotonic_ns, "cpu": time.process_time_ns}
SHAPES = {
    "demo": PRESETS["demo"],
    # experts outweigh the rest, and four rows share few of them, as at the true size
    "wide": replace(
        PRESETS["demo"], hidden_size=640, num_hidden_layers=12, moe_intermediate_size=320, num_experts=128,
        num_experts_per_tok=10, shared_expert_intermediate_size=320, vocab_size=8192, linear_num_value_heads=12,
        linear_num_key_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, ple_embed_dim=640,
    ),
}  # fmt: skip


class Forced(ModelRunner):
    """Runs the model, and says that it answered `known`."""

    known: Sequence[int] = ()

    def forward(self, window: Window, stopped: Callable[[], bool], meanwhile: Meanwhile = nothing) -> Logits | None:
        """The real pass; its logits are replaced."""
        logits = super().forward(window, stopped, meanwhile)
        if logits is None or not self.known:
            return logits
        out = np.zeros_like(logits)
        for row, place in enumerate(window.positions[window.want_logits].tolist()):
            if window.best:
                out[row] = self.known[place + 1]
            else:
                out[row, self.known[place + 1]] = 20.0
        return out


@dataclass
class Lane:
    """A lane without its process."""

    clock: Callable[[], int]
    runner: Forced
    counters: Counters
    pool: StatePool

    def answer(self, drafter: Drafter, prompt: Sequence[int], tokens: int) -> tuple[list[int], Counters]:
        """A greedy answer and what it counted."""

        async def ask() -> tuple[list[int], Counters]:
            engine = Engine(self.runner, self.counters, prefill_chunk_rows=128, drafter=drafter)
            engine.start()
            outbox = Outbox(asyncio.get_running_loop(), 1 << 20)
            engine.submit(Request("bench", tuple(prompt), tokens), outbox)
            events: list[object] = []
            while not events or not isinstance(events[-1], End):
                events += await outbox.take()
            engine.stop()
            end = events.pop()
            assert isinstance(end, End)
            assert end.reason == "length", end.error_message
            return [event.id for event in events], end.counters  # type: ignore[attr-defined]

        return asyncio.run(ask())


@dataclass
class Oracle:
    """Asks the draft layer, and answers with what it should have said at a share of places."""

    lane: Lane
    known: Sequence[int]
    share: float
    seed: int

    def guess(
        self, slot: int, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Likeliest] | None:
        """As `Runner.guess`."""
        if self.lane.runner.guess(slot, token, number, best, meanwhile) is None:
            return None
        place = self.lane.pool[slot].length + 1 + number
        right = np.random.default_rng((self.seed, place)).random() < self.share
        named = self.known[place] if place < len(self.known) else 0
        return [Likeliest(named if right else abs(named - 1), 1.0)]


@contextlib.contextmanager
def lane(
    shape: str, experts: str, threads: int, budget: float, context: int, clock: Callable[[], int], pins: bool
) -> Iterator[Lane]:
    """One of a random pack, made here, whose cache holds a share `budget` of the experts."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder) / "checkpoint", SHAPES[shape], 0, tokenizer=False)
        convert(source, Path(folder) / "pack", experts=experts, dense="bf16", threads=threads)
        with Pack.open(Path(folder) / "pack") as pack:
            info, counters = pack.manifest.experts, Counters()
            kernel = ExpertKernel(info.layout, threads=threads)
            cache_bytes = int(budget * info.layers * info.experts) * info.record_bytes
            first = (info.layers - info.draft_layers) * info.experts
            policy = with_pins(adaptive, np.arange(first, first + info.experts)) if pins else adaptive
            store = ExpertStore(kernel, ExpertCache(FileRecords(pack), info, cache_bytes, policy, counters), counters)
            model = load_model(pack, store, counters=counters, drafts=True)
            pool = StatePool(model.state_shape, 2 * model.state_shape.bytes(context))
            yield Lane(clock, Forced(model, pool, store), counters, pool)
            kernel.close()


def measure(
    shape: str, experts: str, threads: int, rounds: int, tokens: int, budget: float, clock: Callable[[], int],
    pins: bool,
) -> dict[str, object]:  # fmt: skip
    """Gains by share, and the time of windows by rows."""
    prompt = np.random.default_rng(7).integers(10, SHAPES[shape].vocab_size, PROMPT_TOKENS).tolist()
    with lane(shape, experts, threads, budget, PROMPT_TOKENS + tokens, clock, pins) as bench:
        known = [*prompt, *bench.answer(Drafter(0, clock=clock), prompt, tokens)[0]]
        bench.runner.known = known
        beliefs = {share: Beliefs() for share in SHARES}  # a lane keeps what it has learnt
        gains: dict[float, list[float]] = {share: [] for share in SHARES}
        passes: dict[float, list[float]] = {share: [] for share in SHARES}
        hits: dict[float, list[float]] = {share: [] for share in SHARES}
        alone_ms: list[float] = []
        same = True
        for number in range(rounds):
            ids, alone = bench.answer(Drafter(0, clock=clock), prompt, tokens)
            alone_ms.append(alone.decode_ns / 1e6 / (tokens - 1))
            for share in SHARES:
                oracle = Oracle(bench, known, share, number)
                drafter = Drafter(3, oracle.guess, clock=clock, beliefs=beliefs[share])
                again, counted = bench.answer(drafter, prompt, tokens)
                beliefs[share], same = drafter.beliefs, same and again == ids
                gains[share].append(alone.decode_ns / counted.decode_ns)
                passes[share].append((tokens - 1) / counted.decode_windows)
                hits[share].append(counted.expert_hits / (counted.expert_hits + counted.expert_misses))
        most = beliefs[max(SHARES)]
        single = most.windows_ns[0].value
        return {
            "shape": shape,
            "ms_per_token_without_drafts": round(statistics.median(alone_ms), 3),
            "ids_equal": same,
            "windows": [round(mean.value / single, 3) if mean.count else None for mean in most.windows_ns],
            "guess": round(most.guess_ns.value / single, 3),
            "by_injected_acceptance": {
                f"{share:.0%}": {
                    "gain": round(statistics.median(gains[share]), 3),
                    "gains": [round(gain, 3) for gain in gains[share]],
                    "tokens_per_pass": round(statistics.median(passes[share]), 3),
                    "hit_share": round(statistics.median(hits[share]), 4),
                }
                for share in SHARES
            },
        }


def met(seeds: int = 4000, size: int = 64) -> dict[str, dict[str, float]]:
    """How often a draft is the token drawn at temperature 1, for a draft distribution that is the model's or near it.

    `likeliest`: the draft is its best token. `same number`: it is drawn with the number that the model's draw uses.
    `bound`: what any way of sampling drafts can reach, the overlap of both distributions.
    """
    found: dict[str, dict[str, float]] = {}
    random = np.random.default_rng(3)
    for noise in (0.0, 0.3, 1.0):
        likeliest = same = bound = 0.0
        for seed in range(seeds):
            model = (2.5 * random.standard_normal(size)).astype(np.float32)
            layer = (model + noise * random.standard_normal(size)).astype(np.float32)
            sampling = Sampling(temperature=1.0, seed=seed)
            token = choose(model, sampling, 1)
            likeliest += token == int(layer.argmax())
            same += token == choose(layer, sampling, 1)
            p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (model, layer))
            bound += float(np.minimum(p, q).sum())
        found[f"noise {noise}"] = {
            "likeliest": round(likeliest / seeds, 3), "same_number": round(same / seeds, 3),
            "bound": round(bound / seeds, 3),
        }  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--experts", default="q4g64")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--budget", type=float, default=0.25, help="share of the experts that the cache holds")
    parser.add_argument("--no-pins", action="store_true", help="the draft layer's experts are cached like any")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(argv)
    figures = measure(
        chosen.shape, chosen.experts, chosen.threads, chosen.rounds, chosen.tokens, chosen.budget, CLOCKS[chosen.clock],
        not chosen.no_pins,
    )  # fmt: skip
    arguments = [
        *("--shape", chosen.shape, "--rounds", str(chosen.rounds), "--tokens", str(chosen.tokens)),
        *("--threads", str(chosen.threads), "--budget", str(chosen.budget), "--clock", chosen.clock),
        *(["--no-pins"] if chosen.no_pins else []),
    ]
    result = frame(
        "bench.drafts",
        arguments + (["--out", str(chosen.out)] if chosen.out else []),
        pack={"values": "random checkpoint", "shape": chosen.shape, "experts": chosen.experts, "dense": "bf16"},
        conditions={
            "acceptance": "injected by an oracle; passes and guesses are computed, what they say is forced",
            "prompt_tokens": PROMPT_TOKENS, "temperature": 0, "rounds": "interleaved, medians of ratios",
        },
        packages=("torch", "numpy"),
    )  # fmt: skip
    write({**result, **figures, "drafts_that_meet_a_temperature": met()}, chosen.out)


if __name__ == "__main__":
    main()
