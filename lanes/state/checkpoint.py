"""A copy of everything in a state that each token overwrites: with the rows before it, a sequence goes on from here.

Not here: rows that grow (they stay where they are), when one is made or dropped (conversations).
Invariant: the tensors of a checkpoint never change; several sequences may hold one, and it is charged once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.state.sequence import SequenceState


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after `position` tokens. `holders` counts the sequences that have it."""

    position: int
    tensors: tuple[torch.Tensor, ...]
    waiting: int  # of a draft layer
    holders: int = 0
    digest: bytes = b""  # of its bytes, once they were parked

    @classmethod
    def of(cls, state: SequenceState) -> Checkpoint:
        """A copy of where the state is now."""
        assert not state.broken, "a state that a pass left half-advanced is no state"
        waiting = state.draft.waiting if state.draft else 0
        # In host memory, where everything that waits lies.
        return cls(state.length, tuple(tensor.to("cpu", copy=True) for tensor in state.fixed()), waiting)

    def into(self, state: SequenceState) -> None:
        """Takes the state back, or on, to this position; its rows before it must be these tokens'."""
        for tensor, kept in zip(state.fixed(), self.tensors, strict=True):
            tensor.copy_(kept)
        if state.draft is not None:
            state.draft.waiting = self.waiting
        state.length, state.broken = self.position, False

    def erase(self) -> None:
        """Zeroes it; nobody holds it any more."""
        assert self.holders == 0
        for tensor in self.tensors:
            tensor.zero_()
