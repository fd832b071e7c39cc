"""A copy of everything in a state that each token overwrites: with the rows before it, a sequence goes on from here.

Not here: rows that grow (they stay where they are), when one is made or dropped (conversations).
Invariant: the tensors of a checkpoint never change; several sequences may hold one, and it is charged once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.state.host import HERE, PLAIN, Arrival, Host
from lanes.state.sequence import SequenceState


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after `position` tokens. `holders` counts the sequences that have it."""

    position: int
    waiting: int  # of a draft layer
    host: Host  # whose memory it is in
    arrival: Arrival
    kept: tuple[torch.Tensor, ...]  # to be read on the CPU once they arrived
    holders: int = 0
    digest: bytes = b""  # of its bytes, once they were parked

    @classmethod
    def of(cls, state: SequenceState) -> Checkpoint:
        """A copy of where the state is now, in host memory, where everything that waits lies."""
        assert not state.broken, "a state that a pass left half-advanced is no state"
        waiting = state.draft.waiting if state.draft else 0
        if state.seated or state.host is PLAIN:
            kept, arrival = state.host.keep(state.fixed())
        else:
            kept, arrival = state.host.share(state.fixed()), HERE
        return cls(state.length, waiting, state.host, arrival, kept)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of `SequenceState.fixed`."""
        self.arrival.wait()
        return self.kept

    def into(self, state: SequenceState) -> None:
        """Takes the state back, or on, to this position; its rows before it must be these tokens'."""
        if state.seated:
            self.arrival.before_compute()
        else:
            self.arrival.wait()
        state.renew()
        state.host.back(list(zip(state.fixed(), self.kept, strict=True)))
        if state.draft is not None:
            state.draft.waiting = self.waiting
        state.length, state.broken = self.position, False

    def erase(self) -> None:
        """Nobody holds it any more."""
        assert self.holders == 0
        for tensor in self.kept:
            self.host.wipe(tensor)
