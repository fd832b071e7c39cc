"""Memory of the device through which bytes go that lie apart on one side: two halves, used by turns, or as one.

Not here: what goes through. Invariant: whoever gets a piece gets it after its last user, by the device alone.
"""

from __future__ import annotations

import torch

from lanes import limits
from lanes.device.side import Side
from lanes.state.host import HERE, Arrival, room_bytes
from lanes.state.sequence import SequenceState
from lanes.state.shape import StateShape
from shared_experts.layout import align

ALIGNMENT_BYTES = 512


class Piece:
    """A half, or the whole: `memory` uint8, which the computing stream and the copies may use from now on."""

    def __init__(self, staging: Staging, memory: torch.Tensor, halves: tuple[int, ...]) -> None:
        self.memory, self._staging, self._halves = memory, staging, halves

    def free_after(self, arrival: Arrival) -> None:
        """The last that is done with it."""
        for half in self._halves:
            self._staging.free[half] = arrival


class Staging:
    """At least `size_bytes`, taken at once."""

    def __init__(self, side: Side, size_bytes: int) -> None:
        self.half_bytes = align(size_bytes, 2 * ALIGNMENT_BYTES) // 2
        self._memory = torch.empty(2 * self.half_bytes, dtype=torch.uint8, device=side.device)
        self._side, self._next = side, 0
        self.free: list[Arrival] = [HERE, HERE]

    @property
    def size_bytes(self) -> int:
        """Of both halves."""
        return 2 * self.half_bytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._memory.device

    def piece(self, size_bytes: int) -> Piece:
        """A half where that is enough, else the whole."""
        assert size_bytes <= self.size_bytes, "the staging area was planned for the largest part"
        halves = (self._next,) if size_bytes <= self.half_bytes else (0, 1)
        self._next = (halves[0] + 1) % 2
        for half in halves:
            self.free[half].before_compute()
            self._side.after(self.free[half])
        first = halves[0] * self.half_bytes
        return Piece(self, self._memory[first : first + size_bytes], halves)

    def erase(self) -> None:
        """Zeroes what went through, once it has."""
        piece = self.piece(self.size_bytes)
        piece.memory.zero_()
        piece.free_after(self._side.computed())


def size_for(shape: StateShape) -> int:
    """Bytes that any part of such a state goes through, and pages by turns."""
    fixed = SequenceState(shape, 1, device="meta").fixed()
    page_bytes = shape.growing_bytes(min(limits.PAGE_TOKENS, shape.max_tokens))
    return max(room_bytes((tuple(tensor.shape), tensor.dtype) for tensor in fixed), 2 * page_bytes)
