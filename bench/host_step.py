"""What the host does between two decode windows of a GPU lane, and beside one, in microseconds a step.

The real engine, runner, model, cache and search for the CPU's share at the true vocabulary, layers and experts, one
conversation, greedy; only the device and the share's thread are not there: a window writes what it chose into the log
and sleeps. So this runs anywhere, and a change of the host's path is seen before a GPU is asked. Not here: launches and
copies, which cost a GPU's driver some more.

    between   from the end of one window to the launch of the next: the device has nothing to do
    second    from there to the launch of the window's second part: it should not be longer than the first part runs
    beside    from the launch until the host waits: hidden as long as it is shorter than a window

With `--drafts`, a draft layer guesses, two of three times rightly, and windows are of one row and its drafts; a pass of
the layer takes no time but the host's, and `between` has a round's passes in it, `first` is the way to the first launch
after a window, pass or window.

Times are those of the engine's thread on a processor, without waiting for the interpreter and for other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.gpu_lane_rig import small_pack
from bench.tiny_model import TinyConfig
from lanes import limits
from lanes.counters import Counters
from lanes.drafts.drafter import Drafter
from lanes.engine import Engine
from lanes.experts.adaptive import adaptive
from lanes.experts.cache import ExpertCache
from lanes.experts.gpu import experts as gpu_experts
from lanes.experts.gpu import share as gpu_share
from lanes.experts.gpu.experts import GpuExperts
from lanes.experts.gpu.rates import Rates
from lanes.experts.gpu.share import Share
from lanes.experts.native import ExpertKernel
from lanes.experts.share import Tables
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
LAYER_NS = 40_000  # of a window, between two doorbells
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


class StillThread:
    """In the place of the share's thread: it is never late."""

    def __init__(self, kernel: ExpertKernel, tables: Tables, *_: object, **__: object) -> None:
        self.tables = tables

    def arm(self, layers: int) -> None:
        """At once."""

    def check(self) -> bool:
        """No window is in flight."""
        return False

    def close(self) -> None:
        """Nothing to end."""


class Device:
    """Stands in for the launches of a window, and of passes of the draft layer."""

    def __init__(self, experts: GpuExperts, model: GpuQwen4Exp, window_s: float) -> None:
        assert experts.share is not None
        self._log, self._window, self._window_s, self.parts = experts._seen, model._window, window_s, 4
        self._times = experts.share._times
        rng = np.random.default_rng(3)
        skew = 1.0 / (1 + np.arange(EXPERTS)) ** 0.8
        chances = np.stack([rng.permutation(skew / skew.sum()) for _ in range(experts.info.layers)])
        # Of windows by turns what every row chose, a third of it the CPU's.
        self._chosen = [self._drawn(rng, chances) for _ in range(64)]
        self.walk = rng.integers(0, model.spec.vocab, 4096)  # the answer, by place
        self.launched_ns: list[int] = []
        self.second_ns: list[int] = []
        self.waiting_ns: list[int] = []
        self.ended_ns: list[int] = []
        self.passes_ns: list[int] = []
        if (guessing := model._guessing) is not None:
            self._pass = guessing._pass
            guessing._pass.run, guessing._pass.remember = (  # type: ignore[method-assign]
                self._guess, lambda rows: None
            )  # fmt: skip

    @staticmethod
    def _drawn(rng: np.random.Generator, chances: np.ndarray) -> np.ndarray:
        rows = range(limits.MAX_WINDOW_TOKENS)
        chosen = [[np.sort(rng.choice(EXPERTS, CHOSEN, replace=False, p=one)) for _ in rows] for one in chances]
        return 2 * np.array(chosen) + (rng.random((len(chances), len(rows), CHOSEN)) < 1 / 3)

    def clock(self) -> int:
        """What the drafts' policy is told: windows take the same, passes little, the host nothing."""
        return 4_000_000 * len(self.ended_ns) + 200_000 * len(self.passes_ns)

    def token(self, place: int) -> int:
        """What the model says."""
        return int(self.walk[place % 4096])

    def run_part(self, rows: int, part: int) -> None:
        """A window, with its first part."""
        if part == 1:
            self.second_ns.append(time.thread_time_ns())
        if part:
            return
        self.launched_ns.append(time.thread_time_ns())
        number, start = len(self.launched_ns), int(self._window.said.length[0])
        self._log[:LAYERS, :rows] = self._chosen[number % 64][:LAYERS, :rows]
        self._times[:, 0] = np.arange(1, LAYERS + 1) * LAYER_NS
        self._times[:, 1] = self._times[:, 0] + LAYER_NS // 2
        for row in range(rows):
            self._window.best[row] = self.token(start + row + 1)

    def _guess(self, rows: int, number: int, *, named: bool = False) -> None:
        """A pass: at two of three places it knows the token."""
        self.passes_ns.append(time.thread_time_ns())
        said = self._pass.said_further[number - 1] if named else self._pass.said
        place = int(said.length[0]) + rows + 1
        self._log[LAYERS + number, 0] = self._chosen[place % 64][LAYERS, 0]
        self._pass.best[number] = self.token(place + (place % 3 == 0))
        self._pass.share[number] = 0.9

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


@contextlib.contextmanager
def _stood_in() -> Iterator[None]:
    """Launches that would be slow, interpreted, are copies, and the share's thread takes no core."""
    places = ((gpu_experts, "fetch", _copy), (gpu_share, "fetch", _copy), (gpu_share, "CpuShare", StillThread))
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, instead in places:
        setattr(module, name, instead)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


@_stood_in()
def measure(
    folder: Path, steps: int, window_s: float, sizes: TinyConfig = SIZES, *, drafts: bool = False
) -> dict[str, float]:
    """Of the windows of an answer of so many tokens, the first fifth not counted."""
    info, counters = ExpertsInfo("q4g64", 64, 64, LAYERS + drafts, int(drafts), EXPERTS, 1024), Counters()
    cache = ExpertCache(Region(), info, SLOTS * 1024, adaptive, counters, NoSlots(), swap_bytes=25 * 1024)
    experts = GpuExperts(cache, info, CHOSEN, counters, "cpu")
    kernel = ExpertKernel(info.layout, threads=1)
    share = Share(kernel, cache.addresses[:LAYERS].copy(), CHOSEN, torch.device("cpu"))
    share.search(Rates(link_us=50.0, cpu_us=40.0, cpu_start_us=5.0, link_alone_us=50.0, cpu_alone_us=40.0))
    experts.attach(share)
    with small_pack(folder, sizes) as pack:
        inner = load_model(pack, experts, drafts=drafts)
        model = GpuQwen4Exp(inner, experts, 4096, capture=False)  # type: ignore[arg-type]
        device = Device(experts, model, window_s)
        model._launches, model._wait = device, device.wait  # type: ignore[assignment, method-assign]
        states = StatePool(model.state_shape, 1 << 30)
        runner = ModelRunner(model, states, experts, Conversations(states, counters))
        walk = device.walk
        for place in range(2, steps + 8):  # rows of the n-gram table are in memory
            model._saying.ngrams(walk[place - 2 : place], walk[place : place + 1])
        drafter = None
        if drafts:
            drafter = Drafter(limits.MAX_DRAFTS, runner.guess, clock=device.clock, chains=model.chains)
        engine = Engine(runner, counters, prefill_chunk_rows=128, windows_up_to=4, drafter=drafter)
        asyncio.run(_answer(engine, steps))
    kernel.close()
    return _figures(device)


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


def _figures(device: Device) -> dict[str, float]:
    first = 1 + len(device.launched_ns) // 5  # the prompt's not counted
    launched, second, waiting, ended = (
        np.array(of[first:]) for of in (device.launched_ns, device.second_ns, device.waiting_ns, device.ended_ns)
    )
    assert len(launched) == len(second) == len(waiting) == len(ended)
    between = (launched[1:] - ended[:-1]) / 1e3
    passes = np.array([*device.passes_ns, np.iinfo(np.int64).max])
    at_once = (np.minimum(launched[1:], passes[np.searchsorted(passes, ended[:-1])]) - ended[:-1]) / 1e3
    return {
        "between_us": float(np.median(between)), "between_p10_us": float(np.quantile(between, 0.1)),
        "first_us": float(np.median(at_once)), "second_us": float(np.median(second - launched)) / 1e3,
        "beside_us": float(np.median(waiting - launched)) / 1e3,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--window-ms", type=float, default=2.0, help="a window sleeps so long (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="answers; medians are told (default: %(default)s)")
    parser.add_argument("--drafts", action="store_true", help="with a draft layer")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            measure(Path(folder), options.steps, options.window_ms / 1e3, drafts=options.drafts)
            for _ in range(options.rounds)
        ]
    result = {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]}
    json.dump({**result, "steps": options.steps, "cores": os.cpu_count(), "load": os.getloadavg()[0]}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
