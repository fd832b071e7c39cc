"""What the host does between two decode windows of a GPU lane, and beside one, in microseconds a step.

The real engine, runner, model and cache at the true vocabulary, layers and experts, one conversation, greedy, no
drafts; only the device is not there: a window writes what it chose into the log and sleeps. So this runs anywhere, and
a change of the host's path is seen before a GPU is asked. Not here: launches and copies, which cost a GPU's driver some
more.

    between   from the end of one window to the launch of the next: the device has nothing to do
    beside    from the launch until the host waits: hidden as long as it is shorter than a window

Times are those of the engine's thread on a processor, without waiting for the interpreter and for other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.gpu_lane_rig import small_pack
from bench.tiny_model import TinyConfig
from lanes.counters import Counters
from lanes.engine import Engine
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.gpu import experts as gpu_experts
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.slots import HostSlots
from lanes.models import load_model
from lanes.models.qwen4_exp.gpu.model import GpuQwen4Exp
from lanes.outbox import End, Outbox, Token
from lanes.request import Request
from lanes.runner import ModelRunner
from lanes.state.conversations import Conversations
from lanes.state.pool import StatePool
from shared_experts.manifest import ExpertsInfo

LAYERS, EXPERTS, CHOSEN, SLOTS = 48, 512, 10, 4000
VOCABULARY = 248_320
SIZES = TinyConfig(
    vocab_size=VOCABULARY, num_hidden_layers=3, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=3,
    layer_types=("linear_attention", "linear_attention", "full_attention"), heads_per_ngram=8, ple_embed_dim=128,
)  # fmt: skip


class Region:
    """Addresses of records that nobody reads."""

    def record_address(self, layer: int, expert: int) -> int:
        """Any."""
        return 4096 + (layer * EXPERTS + expert) * 1024


class NoSlots(HostSlots):
    """Copies cost what enqueuing them would, nearly."""

    def __init__(self) -> None:
        super().__init__(1, 4096)

    def copy(self, copies, after=None):  # type: ignore[no-untyped-def]
        """Copies nothing."""
        return super().copy([], after)


class Device:
    """Stands in for the launches of a window."""

    def __init__(self, experts: GpuExperts, best: torch.Tensor, vocabulary: int, window_s: float) -> None:
        self._log, self._best, self._window_s, self.parts = experts._seen, best, window_s, 4
        rng = np.random.default_rng(3)
        skew = 1.0 / (1 + np.arange(EXPERTS)) ** 0.8
        chances = np.stack([rng.permutation(skew / skew.sum()) for _ in range(LAYERS)])
        self._chosen = [self._drawn(rng, chances) for _ in range(64)]
        self._drawn_ids = rng.integers(0, vocabulary, 64)
        self.launched_ns: list[int] = []
        self.waiting_ns: list[int] = []
        self.ended_ns: list[int] = []

    @staticmethod
    def _drawn(rng: np.random.Generator, chances: np.ndarray) -> np.ndarray:
        return np.stack([np.sort(rng.choice(EXPERTS, CHOSEN, replace=False, p=one)) for one in chances])

    def run_part(self, rows: int, part: int) -> None:
        """A window, with its first part."""
        if part:
            return
        self.launched_ns.append(time.thread_time_ns())
        number = len(self.launched_ns)
        self._log[:LAYERS, 0] = self._chosen[number % 64]
        self._best[0] = int(self._drawn_ids[number % 64])

    def settle(self) -> None:
        """Nothing is owed."""

    def wait(self) -> None:
        """Until the window has ended; others may use the interpreter meanwhile."""
        if len(self.waiting_ns) == len(self.launched_ns):  # a settling's
            return
        self.waiting_ns.append(time.thread_time_ns())
        time.sleep(self._window_s)
        self.ended_ns.append(time.thread_time_ns())


def _copy(source: torch.Tensor, to: torch.Tensor) -> None:
    to.copy_(source)


def measure(folder: Path, steps: int, window_s: float, sizes: TinyConfig = SIZES) -> dict[str, float]:
    """Of the steps, the first fifth not counted."""
    setattr(gpu_experts, "fetch", _copy)  # noqa: B010 - a launch, interpreted, is slow
    info, counters = ExpertsInfo("q4g64", 64, 64, LAYERS, 0, EXPERTS, 1024), Counters()
    cache = ExpertCache(Region(), info, SLOTS * 1024, adaptive, counters, NoSlots(), swap_bytes=25 * 1024)
    experts = GpuExperts(cache, info, CHOSEN, counters, "cpu")
    with small_pack(folder, sizes) as pack:
        inner = load_model(pack, experts)
        model = GpuQwen4Exp(inner, experts, 4096, capture=False)  # type: ignore[arg-type]
        device = Device(experts, model._window.best, inner.spec.vocab, window_s)
        model._launches, model._wait = device, device.wait  # type: ignore[assignment, method-assign]
        states = StatePool(model.state_shape, 1 << 30)
        runner = ModelRunner(model, states, experts, Conversations(states, counters))
        engine = Engine(runner, counters, prefill_chunk_rows=128, windows_up_to=4)
        asyncio.run(_answer(engine, steps))
    return _figures(device, steps)


async def _answer(engine: Engine, steps: int) -> None:
    engine.start()
    events: list[Token | End] = []
    outbox = Outbox(asyncio.get_running_loop(), 1024)
    engine.submit(Request("bench", (1, 2), steps), outbox)
    while not events or not isinstance(events[-1], End):
        events += await outbox.take()
    engine.stop()
    end = events[-1]
    assert isinstance(end, End)
    assert end.reason == "length", end
    assert len(events) == steps + 1


def _figures(device: Device, steps: int) -> dict[str, float]:
    launched, waiting, ended = (
        np.array(of[-(steps - 1) :]) for of in (device.launched_ns, device.waiting_ns, device.ended_ns)
    )
    first = steps // 5
    assert len(launched) == len(waiting) == len(ended) == steps - 1
    between, beside = (launched[1:] - ended[:-1])[first:] / 1e3, (waiting - launched)[first:] / 1e3
    return {
        "between_us": float(np.median(between)), "between_p10_us": float(np.quantile(between, 0.1)),
        "beside_us": float(np.median(beside)),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--window-ms", type=float, default=2.0, help="a window sleeps so long (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="answers; medians are told (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(Path(folder), options.steps, options.window_ms / 1e3) for _ in range(options.rounds)]
    result = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
    json.dump({**result, "steps": options.steps, "cores": os.cpu_count(), "load": os.getloadavg()[0]}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
