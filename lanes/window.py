"""A window of rows: the one shape of all forward work, prompt chunks and decode steps alike.

Rows of one sequence are contiguous and in ascending position; several sequences may share a window.
Not here: what a row computes (models/) or when a window runs (engine).

Letters: R rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Runs = list[tuple[int, int, int]]
Meanwhile = Callable[[], None]  # what the host has to do while a window is computed, or before; it never waits


def nothing() -> None:
    """Nothing is to be done meanwhile."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows to run. All tensors are 1-D of length R on the CPU; `seq` holds state slot numbers."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R], absolute, from 0
    seq: torch.Tensor  # int64 [R]
    want_logits: torch.Tensor  # bool [R]
    trial: bool = False  # the rows may be rejected: states do not move before a commit
    steered: bool = False  # a prompt's: where the lane routes prompts to resident experts, these rows are
    best: bool = False  # of rows that want logits, only each one's greatest is asked for, by its id
    _runs: Runs | None = field(default=None, repr=False, compare=False)  # where they are known
    ids: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)  # the tokens as an array
    wants_all: bool = field(init=False, repr=False, compare=False)  # logits of every row

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        assert shape[0] > 0, "a window has at least one row"
        assert len(shape) == 1
        assert self.positions.shape == self.seq.shape == self.want_logits.shape == shape
        tell = object.__setattr__  # what is asked for several times a token
        tell(self, "ids", self.token_ids.numpy())
        tell(self, "wants_all", bool(self.want_logits.numpy().all()))
        if self._runs is None:
            tell(self, "_runs", _runs(self.seq.numpy()))

    @classmethod
    def of_sequence(
        cls,
        token_ids: list[int],
        start: int,
        slot: int,
        *,
        logits: str = "last",
        trial: bool = False,
        steered: bool = False,
        best: bool = False,
    ) -> Window:
        """Rows of one sequence from absolute position `start`; `logits` is "none", "last" or "all"."""
        rows = len(token_ids)
        ids, positions, seq = np.array(token_ids, np.int64), np.arange(start, start + rows), np.full(rows, slot)
        tensor, want = torch.from_numpy, _wanted(rows, logits)
        runs = [(slot, 0, rows)]
        return cls(tensor(ids), tensor(positions), tensor(seq), want, trial, steered, best, runs)

    def runs(self) -> Runs:
        """(slot, first row, end row) of each sequence's contiguous rows, in window order."""
        assert self._runs is not None
        return self._runs


@functools.lru_cache(maxsize=16)
def _wanted(rows: int, logits: str) -> torch.Tensor:
    """Nobody writes to it: windows of one kind have the same."""
    want = torch.full((rows,), logits == "all")
    if logits == "last":
        want[-1] = True
    return want


def _runs(seq: npt.NDArray[np.int64]) -> Runs:
    starts = [0, *(np.flatnonzero(seq[1:] != seq[:-1]) + 1).tolist(), len(seq)]
    return [(int(seq[first]), first, end) for first, end in itertools.pairwise(starts)]
