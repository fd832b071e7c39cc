"""Slots of sequence states under one byte budget.

A sequence is charged for its whole capacity when it is opened, so growth can never fail half way through a pass;
checkpoints are charged when they are made. Not here: which sequence stays or goes (conversations).

Invariant: the sum of all open states' and checkpoints' bytes never exceeds `budget_bytes`; memory that is given back
was zeroed.
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
        self._beside_bytes = 0  # charged for checkpoints

    def open(self, max_tokens: int) -> int:
        """A slot with an empty state for up to `max_tokens`."""
        self.require(self.shape.bytes(max_tokens))
        slot = next((s for s in range(self.slots) if s not in self._open), None)
        if slot is None:
            raise NoFreeSlot(f"all {self.slots} slots hold sequences")
        self._open[slot] = SequenceState(self.shape, max_tokens, device=self._device, allocate=self._allocate)
        return slot

    def close(self, slot: int) -> None:
        """Zeroes the state, gives the slot and its bytes back."""
        state = self._open.pop(slot, None)
        if state is None:
            raise UnknownSlot(slot)
        state.erase()

    def reset(self, slot: int) -> None:
        """Empties the sequence in the slot, keeping the slot."""
        self[slot].reset()

    def resize(self, slot: int, max_tokens: int) -> None:
        """The sequence may now have up to `max_tokens`: more, or no fewer than its buffers hold."""
        state = self[slot]
        assert max_tokens >= state.allocated_tokens
        self.require(self.shape.bytes(max_tokens) - self.shape.bytes(state.capacity_tokens))
        state.capacity_tokens = max_tokens

    def charge(self, size_bytes: int) -> None:
        """Counts bytes beside the states; negative gives them back."""
        self.require(size_bytes)
        self._beside_bytes += size_bytes

    def require(self, size_bytes: int) -> None:
        """Raises StateBudgetExceeded where so many bytes are not free."""
        if size_bytes > self.free_bytes:
            raise StateBudgetExceeded(size_bytes, self.free_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes charged to open sequences and checkpoints."""
        return self._beside_bytes + sum(self.shape.bytes(state.capacity_tokens) for state in self._open.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that a new sequence may still take."""
        return self.budget_bytes - self.reserved_bytes

    @property
    def free_slots(self) -> int:
        """How many more sequences may be open."""
        return self.slots - len(self._open)

    def __getitem__(self, slot: int) -> SequenceState:
        try:
            return self._open[slot]
        except KeyError:
            raise UnknownSlot(slot) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)
