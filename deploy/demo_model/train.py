"""`python -m deploy.demo_model.train DATA OUT`: trains, resumes, and stops in time.

Every command goes on where the state in OUT was left, trains for at most `--minutes`, and leaves OUT/state.safetensors,
a line of OUT/log.jsonl every few steps, and OUT/checkpoint in bf16. Not here: the data (`data.prepare`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deploy.demo_model import export, states
from deploy.demo_model.batches import Windows
from deploy.demo_model.compiled import compile_parts, uncompiled
from deploy.demo_model.data import tokens
from deploy.demo_model.group import ALONE, Group
from deploy.demo_model.losses import Shares, losses, total
from deploy.demo_model.model.attention import Reading
from deploy.demo_model.model.network import How, Network
from deploy.demo_model.optimiser import optimisers, set_rate
from deploy.demo_model.recorded import Recorded
from deploy.demo_model.schedule import Phase, Plan
from deploy.demo_model.sizes import DEMO, SMALL, training_flops_per_token

DRAFT_STEPS = 3
TAUGHT_QUERIES = 64  # of a sequence teach the indexer in a step
CLIP_NORM = 1.0
PEAK_FLOPS = 989e12  # dense bf16, by the datasheet of an H200


@dataclass(frozen=True, slots=True)
class Options:
    """What a command asks for."""

    plan: Plan
    minutes: float
    device: str
    bf16: bool
    compile: bool
    record: bool = False
    seed: int = 0
    log_every: int = 20
    check_every: int = 250  # steps between looks at held-out text


class Trainer:
    """A network in training."""

    def __init__(self, data: Path, out: Path, network: Network, options: Options, group: Group = ALONE) -> None:
        self._options, self._plan, self._out, self._group = options, options.plan, out, group
        self.network = network.to(options.device)
        self._parameters = list(self.network.parameters())
        self._optimisers = optimisers(self.network)
        self._recorded: Recorded | None = None
        self._train = Windows(tokens.read(data / f"{tokens.TRAIN}{tokens.SUFFIX}"), options.device, options.seed)
        self._held_out = Windows(tokens.read(data / f"code{tokens.SUFFIX}"), options.device)
        self._state = out / "state.safetensors"
        self.counters = states.Counters()
        if self._state.exists():
            self.counters = states.load(self._state, self.network, self._optimisers)

    def run(self) -> None:
        """Trains until the plan or the command's time is over, then saves."""
        began, counters = time.monotonic(), self.counters
        self._prepare()
        mark, mark_tokens, last = began, counters.tokens, None
        while True:
            progress, spent = self._group.first(self._progress(), time.monotonic() - began)
            if progress >= 1 or spent >= 60 * self._options.minutes:
                break
            phase, before = self._plan.phase_at(progress), time.monotonic()
            parts = self._step(phase, progress)
            starting, last = phase != last, phase
            if starting:  # compiles, allocates: no measure of speed
                self._wait()
                mark, mark_tokens = time.monotonic(), counters.tokens
                continue
            if counters.step % self._options.log_every == 0:
                self._log(phase, parts, progress, counters.tokens - mark_tokens, mark)
                mark, mark_tokens = time.monotonic(), counters.tokens
            if counters.step % self._options.check_every == 0:
                self._write({"step": counters.step, "held_out_code_nats": self.check(phase)})
                mark, mark_tokens = time.monotonic(), counters.tokens
            counters.seconds += time.monotonic() - before
        self._wait()
        self._write(
            {"step": counters.step, "tokens": counters.tokens, "held_out_code_nats": self.check(self._plan.main)}
        )
        if self._group.leads:
            states.save(self._state, self.network, self._optimisers, counters)

    def finished(self) -> bool:
        """Whether the plan is done."""
        return self._group.first(self._progress())[0] >= 1

    @torch.no_grad()
    def check(self, phase: Phase, batches: int = 4) -> float:
        """Mean loss in nats a token of held-out code, dense attention."""
        with self._autocast(), uncompiled(self.network):
            found = []
            for number in range(batches):
                batch = self._held_out.batch(number * phase.sequences, phase.sequences, phase.tokens + 1)
                logits = self.network.logits(self.network(batch[:, :-1]).x)
                found.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()))
        return round(float(torch.stack(found).mean()), 4)

    def _progress(self) -> float:
        return self._plan.progress(self.counters.seconds, self.counters.step)

    def _step(self, phase: Phase, progress: float) -> dict[str, torch.Tensor]:
        counters = self.counters
        set_rate(self._optimisers, self._plan.rate_at(progress, counters.step))
        number = counters.windows.get(str(phase.tokens), 0)
        own = self._group.share(phase.sequences)
        batch = self._train.batch(number + self._group.rank * own, own, phase.tokens + 1 + _draft_steps(phase))
        parts = self._gradients(phase, batch, self._taught(phase))
        self._group.average(self._parameters)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        for optimiser in self._optimisers:
            optimiser.step()
        counters.step += 1
        counters.tokens += phase.sequences * phase.tokens
        counters.windows[str(phase.tokens)] = number + phase.sequences
        return {**parts, "gradient_norm": norm}

    def _gradients(self, phase: Phase, batch: torch.Tensor, taught: torch.Tensor) -> dict[str, torch.Tensor]:
        """Losses of a batch; every parameter's gradient is of this batch alone."""
        if phase == self._plan.main and self._recorded is not None:
            return self._recorded(batch, taught)
        for p in self._parameters:
            p.grad = None
        return self._compute(phase, batch, taught)

    def _compute(self, phase: Phase, batch: torch.Tensor, taught: torch.Tensor) -> dict[str, torch.Tensor]:
        budget = self.network.config.indexer_budget if phase.sparse else None
        steps, chained = _draft_steps(phase), self._group.share(phase.chained)
        with self._autocast(), nullcontext() if phase == self._plan.main else uncompiled(self.network):
            parts = losses(self.network, batch, How(Reading(budget, taught)), steps, chained)
        total(parts, Shares()).backward()
        return {name: value.detach() for name, value in parts.items()}

    def _prepare(self) -> None:
        """Compiles and records the main phase's step, as far as asked and as far as it holds."""
        phase = self._plan.main
        batch = self._train.batch(0, self._group.share(phase.sequences), phase.tokens + 1 + _draft_steps(phase))
        if self._options.compile:
            how = How(Reading(None, self._taught(phase)))
            with self._autocast():
                compile_parts(self.network, lambda: self.network(batch[:, : phase.tokens], how), self._write)
        if self._options.record:
            began = time.monotonic()
            try:
                compute = partial(self._compute, phase)
                self._recorded = Recorded(compute, batch, self._taught(phase), self._parameters)
                spent = round(time.monotonic() - began, 1)
                self._write({"recorded": True, "apart": self._recorded.apart, "seconds": spent})
            except RuntimeError as error:  # training goes on launch by launch
                self._recorded = None
                self._write({"recorded": False, "error": str(error)[:300]})

    def _taught(self, phase: Phase) -> torch.Tensor:
        """Positions int64 [R] whose queries teach the indexer, drawn from where there is something to choose."""
        random = np.random.default_rng([self._options.seed, self.counters.step])
        least = min(self.network.config.indexer_budget, phase.tokens // 2)
        places = random.integers(least, phase.tokens, min(TAUGHT_QUERIES, phase.tokens - least))
        return torch.from_numpy(np.sort(places)).to(self._options.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self._options.device).type, torch.bfloat16, enabled=self._options.bf16)

    def _wait(self) -> None:
        if self._options.device != "cpu":
            torch.cuda.synchronize()

    def _log(self, phase: Phase, parts: dict[str, torch.Tensor], progress: float, count: int, mark: float) -> None:
        values = {name: round(float(value), 4) for name, value in parts.items()}  # waits for the device
        speed = count / (time.monotonic() - mark)
        passes = 1 + phase.chained / phase.sequences * (DRAFT_STEPS - 1)
        flops = training_flops_per_token(self.network.config, phase.tokens, passes)
        memory = torch.cuda.max_memory_allocated() if self._options.device != "cpu" else 0
        self._write(
            {
                "step": self.counters.step, "tokens": self.counters.tokens, "progress": round(progress, 4),
                "sequence": phase.tokens, "rate": self._plan.rate_at(progress, self.counters.step), **values,
                "tokens_per_s": round(speed), "utilisation": round(speed * flops / PEAK_FLOPS / self._group.size, 4),
                "peak_memory_gb": round(memory / 1e9, 1),
            }
        )  # fmt: skip

    def _write(self, line: dict[str, object]) -> None:
        if not self._group.leads:
            return
        text = json.dumps(line)
        with (self._out / "log.jsonl").open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)


def _draft_steps(phase: Phase) -> int:
    """Of a step's sequences at most."""
    return DRAFT_STEPS if phase.chained else 1


def train(data: Path, out: Path, network: Network, options: Options, group: Group = ALONE) -> bool:
    """Trains for one command and exports; returns whether the plan is done."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(data, out, network, options, group)
    trainer.run()
    if group.leads:
        checkpoint = out / "checkpoint"
        shutil.rmtree(checkpoint, ignore_errors=True)
        export.write_checkpoint(checkpoint, network.config, network.state_dict(), data)
    return trainer.finished()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo_model.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.5, help="of this command (default: 8.5)")
    parser.add_argument("--total-minutes", type=float, help="of training in all commands together")
    parser.add_argument("--total-steps", type=int, help="or steps")
    parser.add_argument("--sizes", choices=("demo", "small"), default="demo")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chained", type=int, default=4, help="sequences of a step that draft three steps")
    parser.add_argument("--finish-sequences", type=int, default=2)
    parser.add_argument("--finish-tokens", type=int, default=32768)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--f32", action="store_true", help="no bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--record", action="store_true", help="the step as a CUDA graph")
    o = parser.parse_args()
    if not (o.total_minutes or o.total_steps):
        parser.error("--total-minutes or --total-steps says when training is done")
    plan = Plan(
        o.rate,
        60 * o.total_minutes if o.total_minutes else None,
        o.total_steps,
        Phase(o.sequences, o.tokens, False, o.chained),
        Phase(o.finish_sequences, o.finish_tokens, True, 0),
    )
    group, device = Group.joined(), o.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if o.f32 else "high")
    network = Network(DEMO if o.sizes == "demo" else SMALL)
    done = train(o.data, o.out, network, Options(plan, o.minutes, device, not o.f32, o.compile, o.record), group)
    group.leave()
    if group.leads:
        print("done" if done else "to be continued")


if __name__ == "__main__":
    main()
