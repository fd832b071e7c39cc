"""Slots of sequence states under one byte budget.

A sequence is charged for its whole capacity when it is opened, so growth can never fail half way through a pass.
Not here: which sequence runs, or what to close when there is no room (engine).

Invariant: the sum of all open states' bytes never exceeds `budget_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lanes.state.errors import NoFreeSlot, StateBudgetExceeded, UnknownSlot
from lanes.state.sequence import Allocate, SequenceState
from lanes.state.shape import StateShape


class StatePool(Mapping[int, SequenceState]):
    """Open sequences by slot number; slots are reused, lowest first."""

    def __init__(
        self,
        shape: StateShape,
        budget_bytes: int,
        *,
        slots: int = 64,
        device: torch.device | str = "cpu",
        allocate: Allocate | None = None,
    ) -> None:
        self.shape, self.budget_bytes, self.slots = shape, budget_bytes, slots
        self._device, self._allocate = device, allocate
        self._open: dict[int, SequenceState] = {}

    def open(self, max_tokens: int) -> int:
        """A slot with an empty state for up to `max_tokens`."""
        needed = self.shape.bytes(max_tokens)
        if needed > self.free_bytes:
            raise StateBudgetExceeded(needed, self.free_bytes)
        slot = next((s for s in range(self.slots) if s not in self._open), None)
        if slot is None:
            raise NoFreeSlot(f"all {self.slots} slots hold sequences")
        self._open[slot] = SequenceState(self.shape, max_tokens, device=self._device, allocate=self._allocate)
        return slot

    def close(self, slot: int) -> None:
        """Gives the slot and its bytes back."""
        if self._open.pop(slot, None) is None:
            raise UnknownSlot(slot)

    def reset(self, slot: int) -> None:
        """Empties the sequence in the slot, keeping the slot."""
        self[slot].reset()

    @property
    def reserved_bytes(self) -> int:
        """Bytes charged to open sequences."""
        return sum(self.shape.bytes(state.capacity_tokens) for state in self._open.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that a new sequence may still take."""
        return self.budget_bytes - self.reserved_bytes

    def __getitem__(self, slot: int) -> SequenceState:
        try:
            return self._open[slot]
        except KeyError:
            raise UnknownSlot(slot) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)
