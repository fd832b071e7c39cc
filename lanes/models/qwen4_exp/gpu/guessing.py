"""Guesses of the draft layer on a GPU: what the host says to a pass, its graphs, and what comes of it.

A first guess reads the rows that wait. Of likeliest tokens several guesses are enqueued at once, where kernels can read
the embedding: the device takes each one's token to the next, and the host waits once. The row of a first guess whose
token was then accepted is remembered already: it waits no longer. Where nobody guesses, the rows that wait are
remembered once a window has more than fit one pass with them, and nobody waits for that; a short prompt's go through
the eager blocks.

What the host does between two windows is done with arrays and with views that were made once, as in `saying`. Of the
rows that a window leaves, what the next guess reads is said while the window runs, but for the token that it gives.

Not here: what a pass launches (draft), what a guess is worth (lanes.drafts). Invariants: `DraftState`'s; guesses at
once are those that one after the other would be, to the bit.

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
from lanes.device.mapped import mapped
from lanes.experts.gpu import driver
from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS
from lanes.models.qwen4_exp.gpu.angles import Places
from lanes.models.qwen4_exp.gpu.draft import DraftPass
from lanes.models.qwen4_exp.gpu.inputs import Inputs
from lanes.models.qwen4_exp.gpu.moe import Launches
from lanes.models.qwen4_exp.gpu.saying import HostRows, Ids
from lanes.models.qwen4_exp.mtp import DraftLayer
from lanes.models.qwen4_exp.rows import Rotary
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.seat import Seat
from lanes.state.sequence import DraftState, SequenceState
from lanes.window import Meanwhile, nothing

# (rows, number, whether the device names its token)
Pass = tuple[int, int, bool]
FIRST: tuple[Pass, ...] = tuple((rows, 0, False) for rows in range(1, MOST_ROWS + 1))
FURTHER: tuple[Pass, ...] = tuple((1, number, False) for number in range(1, limits.MAX_DRAFTS))
NAMED: tuple[Pass, ...] = tuple((1, number, True) for number in range(1, limits.MAX_DRAFTS))
Best = list[tuple[int, float]]  # of guesses: place of the greatest logit, -1 where one is not finite; its probability


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


def _copying(to: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None) -> Callable[[], object]:
    """To enqueue a copy, again and again: the driver's own takes less of the host than a tensor's."""
    assert to.is_contiguous()
    assert source.is_contiguous()
    assert (to.shape, to.dtype) == (source.shape, source.dtype)
    if stream is None:
        return functools.partial(to.copy_, source)
    return functools.partial(
        driver.copy, to.data_ptr(), source.data_ptr(), to.nbytes, stream.cuda_stream, pinned=True
    )  # fmt: skip


class Guessing:
    """Of one lane; its sequences are in the seat."""

    def __init__(
        self, layer: DraftLayer, spec: Spec, experts: DraftExperts, seat: Seat, streams: torch.Tensor,
        warm: Callable[[Callable[[], None]], None] | None,
    ) -> None:  # fmt: skip
        """`streams` are those of the last window's rows, fp32 [most R, S * H]. `warm(run)` runs a pass once and awaits
        it, before it is captured; None: launches are made one by one."""
        self._layer, self._experts, self._warm = layer, experts, warm
        device = layer.head.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        embedding = layer.embedding if self._stream is None else mapped(layer.embedding)
        self.chains = embedding is not None
        self._pass = DraftPass(layer, spec, experts, seat, embedding)
        self._said, self._said_late = _Said.of(self._pass.said), _Said.of(self._pass.said_late)
        self._told: tuple[int, list[int]] = (-1, [])  # what `_said` has: from where on, of which ids
        self._said_further = [_Said.of(each) for each in self._pass.said_further]
        self._best, self._share = self._pass.best[:, 0].numpy(), self._pass.share[:, 0].numpy()
        self._embedding = HostRows(layer.embedding)
        rotary = Rotary(spec.rotary_dim, spec.rope_theta, torch.device("cpu"))
        self._places = Places(rotary, spec.index_block_tokens, MOST_ROWS, after=1)
        self._graphs: dict[Pass, torch.cuda.CUDAGraph] = {}
        self._remembering: dict[int, torch.cuda.CUDAGraph] = {}
        # Whose row behind its length is remembered: (state, its length, the token after it), until rows follow.
        self._guessed: tuple[weakref.ref[SequenceState], int, int] | None = None
        home = seat.home.draft
        assert home is not None, "states of a model that drafts have a part for drafts"
        self.streams = streams
        # Copies of rows that follow, by how many wait and how many they are.
        self._following = {
            (waiting, rows): _copying(home.streams[waiting : waiting + rows], streams[:rows], self._stream)
            for waiting in range(MOST_ROWS) for rows in range(1, MOST_ROWS + 1 - waiting)
        }  # fmt: skip
        self._ids: tuple[torch.Tensor, Ids] | None = None  # that wait in the seated sequence, also as an array
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
        self._ids = None  # the sequence's own are its own to zero
        self._erase_pass()

    def _erase_pass(self) -> None:
        self._told = (-1, [])
        self._pass.erase()

    def expect(self, ids: Ids, length: int) -> None:
        """A window of these ids runs, `length` tokens before it, and a guess may follow it at once."""
        # Behind its last row comes whatever it gives; the first pass reads no more rows than it leaves.
        self._say_first([*ids[1:].tolist(), int(ids[0])], length)

    def follow(self, state: SequenceState, ids: Ids) -> None:
        """As `DraftLayer.follow`, of the last window's first rows, which are these ids."""
        guessed, self._guessed = self._guessed, None
        draft, rows = state.draft, len(ids)
        assert draft is not None
        if guessed is not None and guessed[0]() is state and guessed[1:] == (state.length, int(ids[0])):
            draft.waiting = 0
        if draft.waiting <= MOST_ROWS < draft.waiting + rows:
            self._remember(state, draft, int(ids[0]))
        waiting = draft.waiting
        copy = self._following.get((waiting, rows))
        if copy is None:
            self._layer.follow(state, self.streams[:rows], torch.from_numpy(ids))
            return
        copy()
        self._ids_of(draft)[waiting : waiting + rows] = ids
        draft.waiting = waiting + rows

    @torch.no_grad()
    def guess(
        self, state: SequenceState, token: int, number: int, best: int, meanwhile: Meanwhile = nothing
    ) -> torch.Tensor | Best:
        """Logits fp32 [1, D], until the next guess; with `best` what is known of the greatest of up to so many guesses,
        each the input of the next: of fewer only where the layer cannot chain. `meanwhile()` is called while they run.
        """
        draft = state.draft
        assert draft is not None
        self._experts.begin_guess()
        number, place = min(number, limits.MAX_DRAFTS - 1), state.length - 1 + number
        end = number + (min(best, limits.MAX_DRAFTS - number) if self.chains and best else 1)
        if number == 0:
            self._layer.make_room(state)
            if draft.waiting > MOST_ROWS:
                self._layer.catch_up(state, MOST_ROWS)
            rows, waiting = draft.waiting, self._ids_of(draft)
            self._say_first([*waiting[1:rows].tolist(), token], state.length - rows)
            self._launch((rows, 0, False))
            waiting[0], draft.waiting = waiting[rows - 1], 1
            self._guessed = weakref.ref(state), state.length, token
        else:
            self._say_first([token], place)
            self._launch((1, number, False))
        for further in range(number + 1, end):  # said and launched while the one in front runs
            said = self._said_further[further - 1]
            said.length[0] = place + further - number
            self._places.into(said.angles, place + further - number, 1)
            self._launch((1, further, True))
        meanwhile()
        if self._stream is not None:
            self._stream.synchronize()  # what was said may be overwritten from here on
        if not best:
            return self._pass.logits
        return self._found(number, end)

    def _found(self, number: int, end: int) -> Best:
        """What is behind one that is no number is none either."""
        found = list(zip(self._best[number:end].tolist(), self._share[number:end].tolist(), strict=True))
        bad = next((at for at, (place, _) in enumerate(found) if place < 0), len(found))
        return found[:bad] + [(-1, 0.0)] * (len(found) - bad)

    def _remember(self, state: SequenceState, draft: DraftState, token: int) -> None:
        """All rows that wait, `token` being the one after the last of them."""
        rows = draft.waiting
        if rows:
            self._say(self._said_late, [*self._ids_of(draft)[1:rows].tolist(), token], state.length - rows)
            graph = self._remembering.get(rows)
            if graph is None:
                self._pass.remember(rows)
            else:
                graph.replay()
        draft.waiting = 0

    def _ids_of(self, draft: DraftState) -> Ids:
        if self._ids is None or self._ids[0] is not draft.ids:
            self._ids = draft.ids, draft.ids.numpy()
        return self._ids[1]

    def _say_first(self, ids: list[int], start: int) -> None:
        """To a pass that begins with rows; what was said of them already is not said again."""
        rows, (told_start, told) = len(ids), self._told
        if told_start == start and rows <= len(told) and ids[:-1] == told[: rows - 1]:
            self._embedding.into(np.array(ids[-1:]), self._said.embedded[rows - 1 : rows])
        else:
            self._say(self._said, ids, start)
        self._told = start, ids

    def _say(self, said: _Said, ids: list[int], start: int) -> None:
        """Rows from `start` on, of the tokens that follow them."""
        said.length[0] = start
        self._embedding.into(np.array(ids), said.embedded[: len(ids)])
        self._places.into(said.angles, start, len(ids))

    def _launch(self, which: Pass) -> None:
        graph = self._graphs.get(which)
        if graph is None:
            rows, number, named = which
            self._pass.run(rows, number, named=named)
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
        passes = {
            each: functools.partial(self._pass.run, each[0], each[1], named=each[2])
            for each in (*FIRST, *FURTHER, *(NAMED if self.chains else ()))
        }
        with torch.cuda.stream(stream):
            for run in passes.values():
                self._warm(run)
            self._warm(functools.partial(self._pass.remember, MOST_ROWS))
        torch.cuda.synchronize(device)
        self._graphs = {each: captured(run, pool=pool, stream=stream) for each, run in passes.items()}
        self._remembering = {
            rows: captured(functools.partial(self._pass.remember, rows), pool=pool, stream=stream)
            for rows in range(1, MOST_ROWS + 1)
        }
        self._erase_pass()
