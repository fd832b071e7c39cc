"""One model with the state of its sequences and its experts, as the engine sees it: windows in, logits out.

Not here: which window comes next (engine), or how the model computes it.
Invariant: residency of experts changes in `end_window` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lanes import limits
from lanes.counters import Counters
from lanes.experts.policy import Touched
from lanes.experts.store import Interrupted
from lanes.sampler import greedy
from lanes.state.conversations import Begun, Conversations
from lanes.state.pool import StatePool
from lanes.state.sequence import SequenceState
from lanes.window import Meanwhile, Window, nothing

Logits = npt.NDArray[Any]  # fp32 [n wanted, V]; of a window that asks for the best, their ids: int64 [n wanted]
Row = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Of logits: the place of the greatest, the lowest of equal ones, -1 where one is not finite; its probability."""

    place: int
    share: float

    @classmethod
    def of(cls, row: Row) -> Likeliest:
        """Of a row [V]."""
        highest = float(row.max())
        if not math.isfinite(highest):
            return cls(-1, 0.0)
        return cls(int(row.argmax()), float(1.0 / np.exp(row - highest).sum(dtype=np.float64)))


class Runner(Protocol):
    """What the engine needs of a model."""

    def begin(self, max_tokens: int) -> int:
        """An empty sequence with room for that many tokens, to be forgotten; returns its slot."""

    def resume(self, prompt_ids: Sequence[int], max_tokens: int, tenant: bytes) -> Begun:
        """A sequence with room for that many tokens that knows as much of the prompt as anything kept does."""

    def checkpoint(self, slot: int) -> None:
        """Keeps the sequence's state as it is now, if there is room."""

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Tokens start..end-1 of the sequence `ids` will soon be rows; never waits, changes no result."""

    def forward(self, window: Window, stopped: Callable[[], bool], meanwhile: Meanwhile = nothing) -> Logits | None:
        """Logits fp32 [n wanted, V], until the next window's; or None, and the window's sequences are lost, when
        `stopped()` on the way. Of a window that asks for the best: ids int64 [n wanted] as `lanes.sampler.greedy` has.
        `meanwhile()` is called while the device computes, or before; not where none begins."""

    def commit(self, slot: int, rows: int) -> None:
        """Of the trial window that ran last, the first `rows` rows belong to the sequence; before `end_window`."""

    def guess(
        self, slot: int, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> Row | list[Likeliest] | None:
        """The draft layer's logits [V] for what follows `token`, the sequence's next (number 0) or the guess before;
        with `best`, where the model has it, of so many guesses in a row (or one) the greatest alone.

        None when `stopped` of the last window says so; `meanwhile` as in `forward`.
        """

    def end_window(self) -> None:
        """The safe point after a window."""

    def settle(self) -> None:
        """At a safe point: what windows have left for later is done, and their counters are whole."""

    def idle(self) -> bool:
        """A small step of what can be done while nothing runs; False when there is nothing to do for now."""

    def end(self, slot: int) -> None:
        """Forgets a begun sequence; keeps a resumed one."""


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, window: Window, states: StatePool, meanwhile: Meanwhile) -> torch.Tensor:
        """Logits fp32 [n wanted, V], in row order, or ids int64 [n wanted] where the window asks for the best and the
        model has them; `meanwhile()` is called once the device has its work."""

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Tokens start..end-1 of the sequence `ids` will soon be rows."""

    def forget_hints(self) -> None:
        """Hinted tokens will not come."""

    def erase(self) -> None:
        """Zeroes what buffers hold of earlier windows."""

    def settle(self, state: SequenceState) -> None:
        """Whatever an earlier window still owes the state is in it afterwards."""

    def commit(self, state: SequenceState, rows: int) -> None:
        """The first rows of the state's trial window belong to the sequence."""

    def guess(
        self, state: SequenceState, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> torch.Tensor | list[tuple[int, float]]:
        """The draft layer's logits fp32 [V]; with `best`, where the model has it, as of `Likeliest` for each guess.
        `meanwhile` as in `forward`."""


class Experts(Protocol):
    """What the runner needs of the routed experts: `lanes.experts.store`, or their like on a GPU."""

    stopped: Callable[[], bool]
    recorder: Callable[[Touched], None] | None

    def erase(self) -> None:
        """Zeroes what scratch holds of earlier windows."""

    def keep(self, rows: int) -> None:
        """Only the first rows of the trial window were right."""

    def end_window(self) -> None:
        """The safe point after a window."""

    def settle(self) -> None:
        """Whatever `end_window` has left for later."""


class ModelRunner:
    """The real one."""

    def __init__(
        self, model: Model, states: StatePool, experts: Experts, conversations: Conversations | None = None
    ) -> None:
        self._model = model
        self._states = states
        self._experts = experts
        self._conversations = Conversations(states, Counters()) if conversations is None else conversations
        self._tenant = b""  # whose rows scratch buffers may hold
        # By the rows of a window: ids that lie where the last window's did, and an array over them.
        self._ids: dict[int, tuple[torch.Tensor, Logits]] = {}

    def begin(self, max_tokens: int) -> int:
        """Opens a state slot."""
        return self._states.open(max_tokens)

    def resume(self, prompt_ids: Sequence[int], max_tokens: int, tenant: bytes) -> Begun:
        """Takes a conversation up, or opens one; buffers of the last tenant's windows are zeroed for another's."""
        self._turn_to(tenant)
        return self._conversations.begin(prompt_ids, max_tokens, tenant)

    def _turn_to(self, tenant: bytes) -> None:
        if tenant != self._tenant:
            self._experts.erase()
            self._model.erase()
            self._tenant = tenant

    def checkpoint(self, slot: int) -> None:
        """Copies what each token overwrites."""
        self._model.settle(self._states[slot])
        self._conversations.checkpoint(slot)

    def hint(self, ids: Sequence[int], start: int, end: int) -> None:
        """Lets the model read ahead."""
        self._model.hint(ids, start, end)

    def forward(self, window: Window, stopped: Callable[[], bool], meanwhile: Meanwhile = nothing) -> Logits | None:
        """Runs the model."""
        self._experts.stopped = stopped
        if (slot := window.runs()[0][0]) in self._conversations:  # two tenants' generations may run by turns
            self._turn_to(self._conversations[slot].tenant)
        try:
            found = self._model.forward(window, self._states, meanwhile)
        except Interrupted:
            return None
        logits = self._array(found, window)
        if not window.trial:
            for slot, first, end in window.runs():
                self._conversations.read(slot, window.position(first), window.ids[first:end])
        return greedy(logits) if window.best and logits.ndim == 2 else logits

    def _array(self, found: torch.Tensor, window: Window) -> Logits:
        """Ids' is made once: between two windows torch takes as long for that as everything else here."""
        if window.best and (known := self._ids.get(len(window.ids))) is not None and known[0] is found:
            return known[1]
        array: Logits = (found if found.is_cpu else found.cpu()).numpy()
        if window.best and array.ndim == 1 and found.is_cpu:
            self._ids[len(window.ids)] = found, array
        return array

    def commit(self, slot: int, rows: int) -> None:
        """Moves the state on; the expert cache forgets the rows that were wrong."""
        state = self._states[slot]
        start, trial = state.length, state.trial
        self._model.commit(state, rows)
        self._experts.keep(rows)
        if trial is not None:
            self._conversations.read(slot, start, trial.token_ids.numpy()[:rows])

    def guess(
        self, slot: int, token: int, number: int, best: int = 0, meanwhile: Meanwhile = nothing
    ) -> Row | list[Likeliest] | None:
        """Asks the draft layer."""
        try:
            found = self._model.guess(self._states[slot], token, number, best, meanwhile)
        except Interrupted:
            return None
        return found.cpu().numpy() if isinstance(found, torch.Tensor) else [Likeliest(*each) for each in found]

    def end_window(self) -> None:
        """Lets the expert cache turn over; conversations that wait are parked a little further."""
        self._experts.end_window()
        self._conversations.background(limits.PARK_BYTES_PER_STEP)

    def settle(self) -> None:
        """Lets the experts finish."""
        self._experts.settle()

    def idle(self) -> bool:
        """Parks what waits, a step at a time."""
        return self._conversations.idle()

    def end(self, slot: int) -> None:
        """The conversation waits, a begun sequence's slot closes; what was still read ahead is given up."""
        self._model.forget_hints()
        self._experts.settle()
        if (trial := self._states[slot].trial) is not None:
            trial.erase()
            self._states[slot].trial = None
        self._model.settle(self._states[slot])
        if slot in self._conversations:
            self._conversations.end(slot)
        else:
            self._states.close(slot)
