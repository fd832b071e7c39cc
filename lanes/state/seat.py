"""The place in a GPU's memory where the sequence that runs has its state; all others lie in host memory.

Its buffers have room for one sequence of full length and keep their addresses, so that captured graphs can hold them. A
sequence takes the seat before it runs and keeps it, running or not, until another one takes it: then its state moves to
host memory, with room for the tokens it has. While seated its tensors *are* the seat's, so everything else
(checkpoints, snapshots, copies) sees one state wherever it is.

Not here: who runs. Invariants: one occupant; memory that a sequence leaves was zeroed.
"""

from __future__ import annotations

import weakref

import torch

from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape


class Seat:
    """Allocates everything at once. `home` has the tensors; its own length means nothing."""

    def __init__(self, shape: StateShape, capacity_tokens: int, device: torch.device | str) -> None:
        self.home = SequenceState(shape, capacity_tokens, device=device)
        self.home.reserve(capacity_tokens)
        for tensor in self.home.rows(0, capacity_tokens):
            tensor.zero_()
        self._occupant: weakref.ref[SequenceState] | None = None

    @property
    def occupant(self) -> SequenceState | None:
        """Whose state lies here; None once it is gone."""
        return self._occupant() if self._occupant is not None else None

    def take(self, state: SequenceState) -> None:
        """Moves a state of at most the seat's capacity here, and whoever was here to host memory."""
        if self.occupant is state:
            return
        assert state.capacity_tokens <= self.home.capacity_tokens, "the seat is as long as the longest sequence"
        self.leave()
        for layer, mine in self.home.attention.items():
            its = state.attention[layer]
            for each in mine.shape.growing():
                new, old = getattr(mine, each.name), getattr(its, each.name)
                new[..., : old.shape[-2], :].copy_(old)
                old.zero_()
                setattr(its, each.name, new)
        self._move(self.home, state)
        state.seated = True
        self._occupant = weakref.ref(state)

    def leave(self) -> None:
        """Moves the occupant, if any, to host memory."""
        state, self._occupant = self.occupant, None
        if state is None:
            return
        rows = state.allocated_tokens
        for attention in state.attention.values():
            for each in attention.shape.growing():
                old, kept = getattr(attention, each.name), each.rows(0, rows)
                new = torch.empty(each.size(kept.stop), dtype=each.dtype)
                new.copy_(old[..., kept, :])
                old.zero_()
                setattr(attention, each.name, new)
        self._move(SequenceState(state.shape, state.capacity_tokens), state)
        state.seated = False

    @staticmethod
    def _move(to: SequenceState, state: SequenceState) -> None:
        """Fixed parts of `state` become the tensors of `to`, with its values; the old ones are zeroed."""
        pairs: list[tuple[object, object, str]] = []
        for layer, recurrent in state.recurrent.items():
            pairs += [(recurrent, to.recurrent[layer], name) for name in ("matrix", "conv")]
        pairs += [(ngram, to.ngram[layer], "conv") for layer, ngram in state.ngram.items()]
        if state.draft is not None:
            pairs.append((state.draft, to.draft, "streams"))
        for its, new_holder, name in pairs:
            new, old = getattr(new_holder, name), getattr(its, name)
            new.copy_(old)
            old.zero_()
            setattr(its, name, new)
