"""Guesses of the draft layer on a GPU: what the host says to a pass, its graphs, and what comes of it.

A first guess reads the rows that wait. The row of a first guess whose token was then accepted is remembered already: it
waits no longer. Where nobody guesses, the rows that wait are remembered once a window has more than fit one pass with
them, and nobody waits for that; a short prompt's go through the eager blocks.

Not here: what a pass launches (draft), what a guess is worth (lanes.drafts). Invariant: `DraftState`'s.

Letters: R rows, S streams, H hidden, D vocabulary of drafts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.device.capture import captured
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS
from lanes.models.qwen4_exp.gpu.angles import Places
from lanes.models.qwen4_exp.gpu.draft import DraftPass
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.gpu.moe import Launches
from lanes.models.qwen4_exp.gpu.saying import HostRows
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.models.qwen4_exp.rows import Rotary
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.seat import Seat
from lanes.state.sequence import DraftState, SequenceState

PASSES = (*((rows, 0) for rows in range(1, MOST_ROWS + 1)), *((1, number) for number in range(1, limits.MAX_DRAFTS)))


class DraftExperts(Launches, Protocol):
    """Routed experts, as a pass needs them."""

    def begin_guess(self) -> None:
        """A pass of the draft layer begins, between two windows. Raises Interrupted when it is stopped."""


@dataclass(frozen=True, slots=True)
class _Said:
    """`Inputs` as arrays."""

    length: npt.NDArray[np.int32]
    embedded: npt.NDArray[np.float32]
    angles: npt.NDArray[np.float32]

    @classmethod
    def of(cls, said: Inputs) -> _Said:
        """Views."""
        return cls(said.length.numpy(), said.embedded.numpy(), said.angles.numpy())


class Guessing:
    """Of one lane; its sequences are in the seat."""

    def __init__(
        self, layer: DraftLayer, spec: Spec, experts: DraftExperts, seat: Seat,
        warm: Callable[[Callable[[], None]], None] | None,
    ) -> None:  # fmt: skip
        """`warm(run)` runs a pass once and awaits it, before it is captured; None: launches are made one by one."""
        self._layer, self._experts, self._warm = layer, experts, warm
        self._pass = DraftPass(layer, spec, experts, seat)
        self._said, self._said_late = _Said.of(self._pass.said), _Said.of(self._pass.said_late)
        self._embedding = HostRows(layer.embedding)
        rotary = Rotary(spec.rotary_dim, spec.rope_theta, torch.device("cpu"))
        self._places = Places(rotary, spec.index_block_tokens, MOST_ROWS, after=1)
        device = layer.head.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._remembering: dict[int, torch.cuda.CUDAGraph] = {}
        # Whose row behind its length is remembered: (state, its length, the token after it), until rows follow.
        self._guessed: tuple[weakref.ref[SequenceState], int, int] | None = None
        self._take_head()

    @property
    def chained(self) -> torch.Tensor:
        """Streams fp32 [1, S * H] of the last guess, from which the next one goes on."""
        return self._pass.chained

    def narrow(self) -> None:
        """The layer names other tokens from now on."""
        self._pass.take_head()
        self._take_head()

    def forget(self) -> None:
        """Whatever was guessed, the sequence may go on otherwise."""
        self._guessed = None

    def erase(self) -> None:
        """Zeroes what is kept of the last guess."""
        self.forget()
        self._pass.erase()

    def follow(self, state: SequenceState, streams: torch.Tensor, token_ids: torch.Tensor) -> None:
        """As `DraftLayer.follow`."""
        guessed, self._guessed = self._guessed, None
        draft = state.draft
        assert draft is not None
        if guessed is not None and guessed[0]() is state and guessed[1:] == (state.length, int(token_ids[0])):
            draft.waiting = 0
        if draft.waiting <= MOST_ROWS < draft.waiting + len(token_ids):
            self._remember(state, draft, int(token_ids[0]))
        self._layer.follow(state, streams, token_ids)

    @torch.no_grad()
    def guess(self, state: SequenceState, token: int, number: int, best: bool) -> torch.Tensor:
        """Logits fp32 [1, D], until the next guess; with `best` fp64 [2] in host memory: place and probability of the
        greatest."""
        draft = state.draft
        assert draft is not None
        self._experts.begin_guess()
        if number == 0:
            self._layer.make_room(state)
            if draft.waiting > MOST_ROWS:
                self._layer.catch_up(state, MOST_ROWS)
            rows = draft.waiting
            ids = [*draft.ids[1:rows].tolist(), token]
            self._say(self._said, ids, state.length - rows)
            self._launch(rows, 0)
            draft.ids[0], draft.waiting = draft.ids[rows - 1], 1
            self._guessed = weakref.ref(state), state.length, token
        else:
            self._say(self._said, [token], state.length - 1 + number)
            self._launch(1, min(number, limits.MAX_DRAFTS - 1))
        if self._stream is not None:
            self._stream.synchronize()  # what was said may be overwritten from here on
        if not best:
            return self._pass.logits
        return torch.tensor([self._pass.best.item(), self._pass.share.item()], dtype=torch.float64)

    def _remember(self, state: SequenceState, draft: DraftState, token: int) -> None:
        """All rows that wait, `token` being the one after the last of them."""
        rows = draft.waiting
        if rows:
            self._say(self._said_late, [*draft.ids[1:rows].tolist(), token], state.length - rows)
            graph = self._remembering.get(rows)
            if graph is None:
                self._pass.remember(rows)
            else:
                graph.replay()
        draft.waiting = 0

    def _say(self, said: _Said, ids: list[int], start: int) -> None:
        """Rows from `start` on, of the tokens that follow them."""
        said.length[0] = start
        self._embedding.into(np.array(ids), said.embedded[: len(ids)])
        self._places.into(said.angles, start, len(ids))

    def _launch(self, rows: int, number: int) -> None:
        graph = self._graphs.get((rows, number))
        if graph is None:
            self._pass.run(rows, number)
        else:
            graph.replay()

    def _take_head(self) -> None:
        """Captures all passes, where they are captured."""
        if self._warm is None:
            return
        device = self._layer.head.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(stream):
            for rows, number in PASSES:
                self._warm(functools.partial(self._pass.run, rows, number))
            self._warm(functools.partial(self._pass.remember, MOST_ROWS))
        torch.cuda.synchronize(device)
        self._graphs = {
            each: captured(functools.partial(self._pass.run, *each), pool=pool, stream=stream) for each in PASSES
        }
        self._remembering = {
            rows: captured(functools.partial(self._pass.remember, rows), pool=pool, stream=stream)
            for rows in range(1, MOST_ROWS + 1)
        }
        self._pass.erase()
