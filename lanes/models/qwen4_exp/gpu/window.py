"""A decode window, whole: 1 to 4 rows of the seated sequence through every block to logits. Launches only.

`run(rows)` enqueues; it allocates nothing, awaits nothing and reads nothing back, so that it can be captured as a few
graphs a number of rows, and `erase` reaches all that is left of it. What differs between windows the host writes into
`said`; launches bring it into `inputs`, on the device: rows of n-gram tables before the layer that reads them, the rest
first of all.

Not here: capturing (graphs), what is said to a window and what comes of it (model).
Invariants: the state in the seat lags one window behind: the rows that `inputs.accepted` counts are brought in first.
The first part reads no n-gram rows.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lanes.kernels import sampling
from lanes.kernels.attention import Angles
from lanes.kernels.fetch import fetch
from lanes.models.qwen4_exp.attention import Attention
from lanes.models.qwen4_exp.deltanet import DeltaNet
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, multiply
from lanes.models.qwen4_exp.gpu.ahead import plan
from lanes.models.qwen4_exp.gpu.attention import AttentionActivations, AttentionWindow
from lanes.models.qwen4_exp.gpu.deltanet import DeltaActivations, DeltaNetWindow, delta_rows, delta_shape
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.gpu.moe import Launches, MoeActivations, MoeWindow
from lanes.models.qwen4_exp.gpu.ngram import NgramWindow
from lanes.models.qwen4_exp.gpu.stream import MixerWindow
from lanes.models.qwen4_exp.model import Qwen4Exp
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.ngram import NgramLayer
from lanes.models.qwen4_exp.stream import Connected
from lanes.state.seat import Seat

# A graph's first kernel waits until all of its nodes are launched, about 0.4 µs each, a tenth of the time that they
# run: the first part of a window is small, and each one is launched while the smaller one before it runs.
FIRST, GROWTH = 4, 4  # steps, four of which are a layer; the second part has twice the first's


def cuts(steps: int, first: int) -> tuple[int, ...]:
    """Where the parts of so many steps begin, and where the last one ends; the first has at most `first` steps."""
    at, size = [0, min(first, steps)], 2 * FIRST
    while at[-1] + 2 * size < steps:
        at.append(at[-1] + size)
        size *= GROWTH
    return (*at, steps) if at[-1] < steps else tuple(at)


class DecodeWindow:
    """Built once, over a loaded model, its experts and the seat."""

    def __init__(self, model: Qwen4Exp, experts: Launches, seat: Seat) -> None:
        spec, device, dtype, home = model.spec, model.device, model.dtype, seat.home
        self._spec, self._head = spec, model.head
        self.said = Inputs.of(spec, "cpu", pinned=device.type == "cuda")
        self.inputs = Inputs.of(spec, device)
        self._streams = Activations.of(spec, device, dtype)
        self._delta = DeltaActivations.of(spec, device, dtype)
        self._attention = AttentionActivations.of(spec, home.capacity_tokens, device, dtype)
        self._moe = MoeActivations.of(spec, device, dtype)
        self.logits = torch.zeros((MOST_ROWS, spec.vocab), device=device)
        self._bests = torch.zeros((MOST_ROWS, sampling.blocks(spec.vocab)), dtype=torch.int64, device=device)
        # Ids of the greatest logits, where the host finds them.
        self.best = torch.zeros(MOST_ROWS, dtype=torch.int64, pin_memory=device.type == "cuda")
        replay = self._replay = delta_rows(delta_shape(spec), device)
        self._steps: list[Callable[[int], None]] = []
        self._settling: list[DeltaNetWindow | NgramWindow] = []
        first, before = FIRST, None  # and the MoE in front
        for block in model.blocks:
            if isinstance(block, NgramLayer):
                number = spec.ngram_layers.index(block.layer)
                state = home.ngram[block.layer]
                ngram = NgramWindow(block, spec, state, self.inputs.accepted, self.inputs.ngram[number])
                self._settling.append(ngram)
                first = min(first, len(self._steps))
                self._steps.append(self._ngram_step(ngram, number))
                continue
            assert isinstance(block, Connected)
            self._steps.append(self._mixing_step(MixerWindow(block.mixer, spec.eps)))
            inner = block.block
            if before is not None and isinstance(inner, DeltaNet | Attention):
                before.ahead = plan(inner.inputs)
            if isinstance(inner, DeltaNet):
                delta = DeltaNetWindow(inner, spec, home.recurrent[inner.layer], replay, self.inputs.accepted)
                self._settling.append(delta)
                self._steps.append(self._delta_step(delta))
            elif isinstance(inner, Attention):
                kept = home.attention[inner.layer]
                self._steps.append(self._attention_step(AttentionWindow(inner, spec, kept, self.inputs.length)))
            else:
                assert isinstance(inner, Moe)
                before = MoeWindow(inner, spec, inner.layer, experts)
                self._steps.append(self._moe_step(before))
        self._last = self._mixing_step(MixerWindow(model.mixer, spec.eps))
        self._cuts = cuts(len(self._steps), first)
        self.parts = len(self._cuts) - 1

    def run(self, rows: int) -> None:
        """Enqueues the window; `logits[:rows]`, `best[:rows]` and `streams(rows)` are its results."""
        for part in range(self.parts):
            self.run_part(rows, part)

    @torch.no_grad()
    def run_part(self, rows: int, part: int) -> None:
        """Enqueues one of the window's `parts`, all of them in order being the window."""
        if part == 0:
            self._begin(rows)
        for step in self._steps[self._cuts[part] : self._cuts[part + 1]]:
            step(rows)
        if part == self.parts - 1:
            self._end(rows)

    def _begin(self, rows: int) -> None:
        self._listen()
        a = self._streams.narrow(rows)
        a.x.copy_(self.inputs.embedded[:rows, None].expand_as(a.x))
        a.result.zero_()
        a.injection.zero_()

    def _end(self, rows: int) -> None:
        self._last(rows)
        a = self._streams.narrow(rows)
        u = a.u if self._head.dtype == torch.float32 else a.u_rounded
        multiply(u, self._head, self.logits[:rows])
        sampling.greatest(self.logits[:rows], self._bests[:rows], self.best)

    @torch.no_grad()
    def settle(self) -> None:
        """Enqueues: the accepted rows of the last window are brought into the seat, and nothing else."""
        self._listen()
        one = self._delta.narrow(1)
        for each in self._settling:
            if isinstance(each, NgramWindow):
                each.settle()
            else:
                each.settle(one)

    def erase(self) -> None:
        """Zeroes what is kept of earlier windows; the state must be settled."""
        for part in (self._streams, self._delta, self._attention, self._moe, *self._settling):
            for tensor in part.tensors():
                tensor.zero_()
        replay = self._replay
        for tensor in (replay.mixed, replay.decay, replay.beta, self.logits, self._bests, self.best):
            tensor.zero_()
        for tensor in (self.inputs.buffer, self.said.buffer):
            tensor.zero_()

    def streams(self, rows: int) -> torch.Tensor:
        """fp32 [R, S * H]: the residual streams of the last window's rows, until the next window."""
        return self._streams.x[:rows].flatten(1)

    def _listen(self) -> None:
        _fetch(self.said.first, self.inputs.first)

    def _mixing_step(self, mixer: MixerWindow) -> Callable[[int], None]:
        return lambda rows: mixer.run(self._streams.narrow(rows))

    def _ngram_step(self, ngram: NgramWindow, number: int) -> Callable[[int], None]:
        def step(rows: int) -> None:
            _fetch(self.said.ngram[number, :rows], self.inputs.ngram[number, :rows])
            ngram.run(self._streams.narrow(rows))

        return step

    def _delta_step(self, delta: DeltaNetWindow) -> Callable[[int], None]:
        return lambda rows: delta.run(self._streams.narrow(rows), self._delta.narrow(rows))

    def _attention_step(self, attention: AttentionWindow) -> Callable[[int], None]:
        def step(rows: int) -> None:
            angles = Angles(*(part[:rows] for part in self.inputs.angles))
            attention.run(self._streams.narrow(rows), self._attention.narrow(rows), angles)

        return step

    def _moe_step(self, moe: MoeWindow) -> Callable[[int], None]:
        return lambda rows: moe.run(self._streams.narrow(rows), self._moe.narrow(rows))


def _fetch(said: torch.Tensor, to: torch.Tensor) -> None:
    fetch(said.flatten().view(torch.int32), to.flatten().view(torch.int32))
