"""What a window of trial rows would change in a sequence: kept beside the state, which such a window leaves alone.

Trial rows are drafts that may be rejected. They read the state and write nothing that counts: rows past `length` are
overwritten by whatever comes next, everything else waits here until `commit` says how many rows were right.
Not here: taking rows over (`commit`), computing them (models).

Invariant: a trial that is never committed has not happened. The inputs of all rows are a few megabytes; a copy of the
state after each row would be a hundred each.

Letters: R rows, N value heads, K key size, V value size, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """What one DeltaNet layer's state is advanced with, row by row."""

    steps: tuple[torch.Tensor, ...]  # q, k [R, N, K], v [R, N, V], g, beta [R, N]: arguments of the delta rule
    columns: torch.Tensor  # [R, C] that go into the convolution's tail


@dataclass(slots=True, eq=False)
class Trial:
    """One window's rows of one sequence."""

    token_ids: torch.Tensor  # int64 [R] on the CPU
    recurrent: dict[int, RecurrentInputs] = field(default_factory=dict)  # by layer
    ngram: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: [R, C] columns of the convolution's tail
    streams: torch.Tensor | None = None  # fp32 [R, all streams end to end], for the draft layer
    _scratch: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows are on trial."""
        return self.token_ids.shape[0]

    def erase(self) -> None:
        """Zeroes everything; the rows never were."""
        tensors = [x for inputs in self.recurrent.values() for x in (*inputs.steps, inputs.columns)]
        for tensor in (*tensors, *self.ngram.values(), self.streams, self._scratch):
            if tensor is not None:
                tensor.zero_()

    def copy_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """A layer's matrix to run the rows on; one buffer for all layers, which run one after another."""
        if self._scratch is None or self._scratch.shape != matrix.shape:
            self._scratch = torch.empty_like(matrix)
        return self._scratch.copy_(matrix)
