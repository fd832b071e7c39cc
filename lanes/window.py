"""A window of rows: the one shape of all forward work, prompt chunks and decode steps alike.

Rows of one sequence are contiguous and in ascending position; several sequences may share a window.
Not here: what a row computes (models/) or when a window runs (engine).

Letters: R rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
Runs = list[tuple[int, int, int]]
Meanwhile = Callable[[], None]  # what the host has to do while a window is computed, or before; it never waits


def nothing() -> None:
    """Nothing is to be done meanwhile."""


class Window(NamedTuple):
    """Rows to run. Tensors are made when they are asked for: between two decode windows each of them costs more than
    the rest of what is said here, and nobody there asks."""

    ids: Ids  # [R], the tokens
    spans: Runs  # what `runs` says
    want_logits: torch.Tensor  # bool [R]
    wants_all: bool  # logits of every row
    start: int  # the first row's position, from where one sequence's go on;
    placed: torch.Tensor | None = None  # else those of all rows
    trial: bool = False  # the rows may be rejected: states do not move before a commit
    steered: bool = False  # a prompt's: where the lane routes prompts to resident experts, these rows are
    best: bool = False  # of rows that want logits, only each one's greatest is asked for, by its id

    @classmethod
    def of_rows(
        cls, token_ids: torch.Tensor, positions: torch.Tensor, seq: torch.Tensor, want_logits: torch.Tensor
    ) -> Window:
        """Of any sequences: the rows' tokens, absolute positions from 0, state slot numbers (int64 [R] on the CPU) and
        whether their logits are wanted (bool [R])."""
        shape = token_ids.shape
        assert shape[0] > 0, "a window has at least one row"
        assert len(shape) == 1
        assert positions.shape == seq.shape == want_logits.shape == shape
        runs, wants_all = _runs(seq.numpy()), bool(want_logits.all())
        return cls(token_ids.numpy(), runs, want_logits, wants_all, int(positions[0]), positions)

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
        assert rows > 0, "a window has at least one row"
        wants_all = logits == "all" or (logits == "last" and rows == 1)
        want = _wanted(rows, logits)
        return cls(np.array(token_ids, np.int64), [(slot, 0, rows)], want, wants_all, start, None, trial, steered, best)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [R]."""
        return torch.from_numpy(self.ids)

    @property
    def positions(self) -> torch.Tensor:
        """int64 [R], absolute, from 0."""
        if self.placed is not None:
            return self.placed
        return torch.arange(self.start, self.start + len(self.ids))

    @property
    def seq(self) -> torch.Tensor:
        """State slot numbers, int64 [R]."""
        return torch.tensor([slot for slot, first, end in self.spans for _ in range(first, end)])

    def runs(self) -> Runs:
        """(slot, first row, end row) of each sequence's contiguous rows, in window order."""
        return self.spans

    def position(self, row: int) -> int:
        """Of one row."""
        return self.start + row if self.placed is None else int(self.placed[row])

    def consecutive(self, first: int, end: int) -> bool:
        """Whether each of the rows first..end-1 stands right behind the one before it."""
        if self.placed is None:
            return True
        start = self.position(first)
        return self.placed[first:end].tolist() == list(range(start, start + end - first))


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
