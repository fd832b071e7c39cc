"""A pass of the draft layer: rows that it has to remember and the one that is asked, to its guess. Launches only.

As a decode window (window): enqueued at fixed places, so that it can be captured; a graph for each number of rows and
place of the guess. Every row leaves its keys and values, the last one alone meets experts and head. A guess behind
another one is about a token that the host says, or about the one that the guess before has named: the device then
finds its embedding, and the host need not know it yet.

Not here: which rows, capturing (guessing). Invariants: a pass allocates nothing, so that `erase` reaches all that it
leaves; beside its own places it writes the draft layer's keys in the seat, and for a first guess moves the asked row's
streams to the front of those that wait.

Letters: R rows, S streams, H hidden, D vocabulary of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes import limits
from lanes.kernels import sampling
from lanes.kernels.attention import Angles
from lanes.kernels.fetch import fetch, fetch_named
from lanes.kernels.normed import normed
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS, Activations, Narrowing, multiply, whole_streams
from lanes.models.qwen4_exp.gpu.attention import AttentionActivations, AttentionWindow
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.gpu.moe import Launches, MoeActivations, MoeWindow
from lanes.models.qwen4_exp.gpu.stream import MixerWindow
from lanes.models.qwen4_exp.moe import Moe
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.seat import Seat


@dataclass(frozen=True, slots=True)
class Entering(Narrowing):
    """What the layer's input is made of."""

    embedded_rounded: torch.Tensor  # [R, H] in the type of the matrices
    streams_rounded: torch.Tensor  # [R, S * H]
    embedded: torch.Tensor  # fp32 [R, H], behind its matrix

    @classmethod
    def of(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> Entering:
        """For the most rows."""
        hidden, wide = spec.hidden, spec.streams * spec.hidden
        sizes = ((hidden, dtype), (wide, dtype), (hidden, torch.float32))
        return cls(*(torch.zeros((MOST_ROWS, size), dtype=kind, device=device) for size, kind in sizes))


class DraftPass:
    """Built once, over a loaded draft layer, its experts and the seat."""

    def __init__(
        self, layer: DraftLayer, spec: Spec, experts: Launches, seat: Seat, embedding: torch.Tensor | None
    ) -> None:
        """`embedding` is where kernels read it; None: they cannot, so no token is `named`."""
        home, device, dtype = seat.home, layer.head.device, layer.fc_streams.dtype
        assert home.draft is not None, "states of a model that drafts have a part for drafts"
        self._layer, self._spec, on_gpu = layer, spec, device.type == "cuda"
        self._embedding = embedding
        self.said, self.inputs = Inputs.of(spec, "cpu", pinned=on_gpu), Inputs.of(spec, device)
        # Where the guesses stand that follow a first one by themselves.
        self.said_further = [Inputs.of(spec, "cpu", pinned=on_gpu) for _ in range(1, limits.MAX_DRAFTS)]
        # Of rows that are only remembered: nobody waits for them before the next guess is said.
        self.said_late, self._inputs_late = Inputs.of(spec, "cpu", pinned=on_gpu), Inputs.of(spec, device)
        self._entering = Entering.of(spec, device, dtype)
        self._streams = Activations.of(spec, device, dtype)
        self._attended = AttentionActivations.of(spec, home.capacity_tokens, device, dtype)
        self._routed = MoeActivations.of(spec, device, dtype)
        number, thinking = layer.attention.layer, layer.thinking.block
        assert isinstance(thinking, Moe)
        self._attention = AttentionWindow(layer.attention, spec, home.attention[number], self.inputs.length)
        self._moe = MoeWindow(thinking, spec, number, experts)
        self._mixers = [
            MixerWindow(mixer, spec.eps) for mixer in (layer.attending.mixer, layer.thinking.mixer, layer.mixer)
        ]
        self._waiting = home.draft.streams
        # Of the last guess: the next one goes on from them.
        self.chained = torch.zeros((1, spec.streams * spec.hidden), device=device)
        # Where the host finds each guess's likeliest token, as a place, -1 where a logit is not finite, and its
        # probability; 16 bytes apart, which is an address as kernels like it.
        self.best = torch.zeros((limits.MAX_DRAFTS, 2), dtype=torch.int64, pin_memory=on_gpu)
        self.share = torch.zeros((limits.MAX_DRAFTS, 4), pin_memory=on_gpu)
        self.take_head()

    def take_head(self) -> None:
        """The layer has another head from now on; passes that were captured are of the old one."""
        head = self._layer.head
        self._head, self._tokens = head, self._layer.tokens
        self.logits = torch.zeros((1, head.shape[0]), device=head.device)
        blocks = sampling.blocks(head.shape[0])
        self._bests = torch.zeros((1, blocks), dtype=torch.int64, device=head.device)
        self._sums = torch.zeros((1, 2, blocks), device=head.device)

    @torch.no_grad()
    def run(self, rows: int, number: int, *, named: bool = False) -> None:
        """Enqueues: number 0 reads `rows` rows that wait, others the streams of the guess before, which is one row.

        `named`: it is about the token that the guess before has named, at the place that `said_further` says.
        """
        attending, thinking, reading = self._mixers
        if named:
            assert self._embedding is not None, "kernels read the embedding"
            fetch(self.said_further[number - 1].places.view(torch.int32), self.inputs.places.view(torch.int32))
            fetch_named(self.best[number - 1, :1], self._tokens, self._embedding, self.inputs.embedded[0])
        else:
            fetch(self.said.first.view(torch.int32), self.inputs.first.view(torch.int32))
        a, angles = self._begin(self.inputs, self.chained if number else self._waiting[:rows])
        attending.run(a)
        self._attention.run(a, self._attended.narrow(rows), angles)
        whole_streams(a)
        last = a.only(rows - 1)
        thinking.run(last)
        self._moe.run(last, self._routed.narrow(1), number)
        reading.run(last)
        multiply(last.u if self._head.dtype == torch.float32 else last.u_rounded, self._head, self.logits)
        sampling.likeliest(self.logits, self._bests, self._sums, self.best[number, :1], self.share[number, :1])
        self.chained.copy_(last.x.flatten(1))
        if rows > 1:
            self._waiting[0].copy_(self._waiting[rows - 1])

    @torch.no_grad()
    def remember(self, rows: int) -> None:
        """Enqueues: the rows that wait leave their keys and values."""
        fetch(self.said_late.first.view(torch.int32), self._inputs_late.first.view(torch.int32))
        a, angles = self._begin(self._inputs_late, self._waiting[:rows])
        self._mixers[0].run(a)
        self._attention.remember(a, self._attended.narrow(rows), angles, self._inputs_late.length)

    def _begin(self, inputs: Inputs, streams: torch.Tensor) -> tuple[Activations, Angles]:
        """The layer's input enters: streams fp32 [R, S * H] of each row, embedded the token after it."""
        layer, spec, rows = self._layer, self._spec, len(streams)
        a, e = self._streams.narrow(rows), self._entering.narrow(rows)
        normed(inputs.embedded[:rows], layer.norm_embedding, e.embedded_rounded, spec.eps)
        normed(streams, layer.norm_streams, e.streams_rounded, spec.eps)
        multiply(e.embedded_rounded, layer.fc_embedding, e.embedded)
        multiply(e.streams_rounded.view(-1, spec.hidden), layer.fc_streams, a.x.view(-1, spec.hidden))
        a.x.add_(e.embedded[:, None])
        a.result.zero_()
        a.injection.zero_()
        return a, Angles(*(part[:rows] for part in inputs.angles))

    def erase(self) -> None:
        """Zeroes what is kept of earlier passes, the last guess's streams among it."""
        for part in (self._entering, self._streams, self._attended, self._routed):
            for tensor in part.tensors():
                tensor.zero_()
        for tensor in (self.chained, self.logits, self._bests, self._sums, self.best, self.share):
            tensor.zero_()
        for each in (self.inputs, self.said, self._inputs_late, self.said_late, *self.said_further):
            each.buffer.zero_()
