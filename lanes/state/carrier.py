"""Bytes of a conversation between its state and segments of the park pool. Here by the calling thread, at once.

    out     part ──▶ segments, named by the digest of its bytes
    back    segments ──▶ part, if their bytes have the digest that names them

`lanes.device.carrier` does the same for a GPU's memory, beside what computes. Not here: which parts, the pool's index
(parking). Invariants: `back` that returns has brought nothing but verified bytes; after `settle` no segment is read or
written any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lanes import limits
from lanes.state import snapshot
from lanes.state.errors import SnapshotRefused
from lanes.state.sequence import SequenceState
from shared_experts.park_memory import ParkMemory

Segments = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """A page: what tokens first..end-1 have in growing buffers; of what comes back nothing from token `until` on."""

    state: SequenceState
    first: int
    end: int
    until: int
    size_bytes: int  # in the pool

    @property
    def seated(self) -> bool:
        """Whether they are in a seat."""
        return self.state.seated

    @property
    def kept(self) -> bool:
        """Whether nobody writes them: the conversation goes on, or goes."""
        return False

    @classmethod
    def of(cls, state: SequenceState, pages: Iterable[int], tokens: int, until: int) -> list[Rows]:
        """Pages by number of a conversation of so many tokens."""
        ranges = [snapshot.page_range(page, tokens) for page in pages]
        sizes = snapshot.pages_bytes(state.shape, ranges)
        return [cls(state, *each, until, size) for each, size in zip(ranges, sizes, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        """Views of them."""
        return self.state.rows(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Tensors of fixed size: those of a state, which may be in its seat, of a checkpoint; or any bytes."""

    of: tuple[torch.Tensor, ...]
    seated: bool = False
    kept: bool = False  # nobody writes them, for as long as somebody refers to them

    @property
    def size_bytes(self) -> int:
        """In the pool."""
        return sum(tensor.nbytes for tensor in self.of)

    def tensors(self) -> list[torch.Tensor]:
        """They."""
        return list(self.of)


Part = Rows | Fixed


class Job:
    """Parts on their way out: here they are there."""

    def __init__(self, names: list[bytes]) -> None:
        self._names = names

    def done(self, within_s: float = 0.0) -> bool:
        """Whether `names` would not wait; looks for so long."""
        return True

    def hurry(self) -> None:
        """Nothing computes any more, or somebody waits."""

    def names(self) -> list[bytes]:
        """Of the parts, once they are in their segments."""
        return self._names


class Carrier:
    """For states in host memory."""

    batch_bytes = limits.PARK_BYTES_PER_STEP // 4  # that should go out together

    def out(self, memory: ParkMemory, parts: Sequence[Part], places: Sequence[Segments], *, hurry: bool) -> Job:
        """Begins; the parts may change at once. `hurry`: nothing computes meanwhile, or somebody waits."""
        names = []
        for part, segments in zip(parts, places, strict=True):
            data = snapshot.pack(part.tensors())
            names.append(snapshot.digest(data))  # of the source: what happens to the pool since is seen
            memory.write(segments, data)
        return Job(names)

    def back(
        self, memory: ParkMemory, parts: Sequence[Part], places: Sequence[Segments], names: Sequence[bytes]
    ) -> None:
        """Until all are there and verified; raises SnapshotRefused, and the parts hold anything then."""
        for part, segments, name in zip(parts, places, names, strict=True):
            data = np.empty(part.size_bytes, np.uint8)
            memory.read(segments, data)
            if snapshot.digest(data) != name:
                raise SnapshotRefused("a damaged part")
            if isinstance(part, Rows):
                snapshot.unpack_page(data, part.state, part.first, part.end, part.until)
            else:
                snapshot.unpack(data, part.of)

    def settle(self) -> None:
        """Until nothing is under way any more; what has not begun is given up, and its job's names are never asked."""

    def welcome(self, state: SequenceState) -> None:
        """Something will come `back` to this fresh state, which runs next."""

    def look(self, memory: ParkMemory) -> bool:
        """A small step of getting ready for the pool's first bytes; False when there is none left to do."""
        return False

    def forget(self) -> None:
        """The pool's memory goes."""
