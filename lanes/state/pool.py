"""Slots of sequence states under one byte budget.

A sequence is charged for its whole capacity when it is opened, so growth can never fail half way through a pass;
checkpoints are charged when they are made. In a paged pool a branch shares its root's pages (`pages`): they are charged
once, and what is left open in each buffer's last page is charged too. Not here: which sequence stays or goes
(conversations).

Where who runs lies in a seat, its bytes are free in host memory meanwhile: a conversation that must go may stay there
for so long (`lent_bytes`), until it is parked.

Invariant: the sum of all open states' and checkpoints' bytes never exceeds `budget_bytes` and what is lent, but for the
moment in which a state that went back has given up pages that others hold; memory that is given back was zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from lanes.state.errors import NoFreeSlot, StateBudgetExceeded, UnknownSlot
from lanes.state.host import Host
from lanes.state.pages import PageMemory
from lanes.state.sequence import Allocate, SequenceState
from lanes.state.shape import StateShape


@dataclass(frozen=True, slots=True)
class Branch:
    """The first `tokens` of a root, of which those from `settled` on may be written anew (a draft layer's rows)."""

    root: SequenceState
    settled: int
    tokens: int

    def sharable_bytes(self) -> int:
        """What the branch need not take again."""
        return self.root.sharable_bytes(self.settled)


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
        paged: bool = False,
        host: Host | None = None,
        branch: Callable[[SequenceState, SequenceState, int], None] | None = None,
    ) -> None:
        """With `host`, states have their memory from there. `branch(state, root, tokens)` gives a state that runs next
        a root's first rows, where that is not by copying them in host memory."""
        self.shape, self.budget_bytes, self.slots = shape, budget_bytes, slots
        self._memory = PageMemory.of(shape) if paged else None
        self._device, self._allocate, self._host, self._branch = device, allocate, host, branch
        self._open: dict[int, SequenceState] = {}
        self._beside_bytes = 0  # charged for checkpoints
        self.seats = branch is not None  # who runs lies elsewhere
        self.lent_bytes = 0  # to conversations on their way out

    def bytes(self, max_tokens: int) -> int:
        """What a sequence of that capacity is charged, if it shares nothing."""
        if self._memory is None:
            return self.shape.bytes(max_tokens)
        columns = sum(max(1, each.heads) for s in self.shape.attention.values() for each in s.growing())
        return self.shape.bytes(max_tokens) + columns * self._memory.page_bytes

    def tokens_in(self, size_bytes: int) -> int:
        """The most tokens that a sequence charged that many bytes has room for; 0: none."""
        return self.shape.tokens_in(size_bytes - self.bytes(1) + self.shape.bytes(1))

    def open(self, max_tokens: int, branch: Branch | None = None) -> int:
        """A slot with a state for up to `max_tokens`: empty, or with the rows of `branch`, whose length is still 0."""
        self.require(self.bytes(max_tokens) - (branch.sharable_bytes() if branch else 0))
        slot = next((s for s in range(self.slots) if s not in self._open), None)
        if slot is None:
            raise NoFreeSlot(f"all {self.slots} slots hold sequences")
        state = SequenceState(
            self.shape, max_tokens, device=self._device, allocate=self._allocate, memory=self._memory, host=self._host
        )
        if branch is not None and self._branch is not None:
            self._branch(state, branch.root, branch.tokens)
        elif branch is not None:
            state.take_over(branch.root, branch.settled, branch.tokens)
        self._open[slot] = state
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
        self.require(self.bytes(max_tokens) - self.bytes(state.capacity_tokens))
        state.capacity_tokens = max_tokens

    def charge(self, size_bytes: int) -> None:
        """Counts bytes beside the states; negative gives them back."""
        self.require(size_bytes)
        self._beside_bytes += size_bytes

    def require(self, size_bytes: int) -> None:
        """Raises StateBudgetExceeded where so many bytes are not free."""
        if size_bytes > max(0, self.free_bytes):  # giving back always may
            raise StateBudgetExceeded(size_bytes, self.free_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes charged to open sequences and checkpoints."""
        saved = self._memory.saved_bytes if self._memory else 0
        return self._beside_bytes + sum(self.bytes(state.capacity_tokens) for state in self._open.values()) - saved

    @property
    def free_bytes(self) -> int:
        """Bytes that a new sequence may still take."""
        return self.budget_bytes + self.lent_bytes - self.reserved_bytes

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
