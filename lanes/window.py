"""A window of rows: the one shape of all forward work, prompt chunks and decode steps alike.

Rows of one sequence are contiguous and in ascending position; several sequences may share a window.
Not here: what a row computes (models/) or when a window runs (engine).

Letters: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """Rows to run. All tensors are 1-D of length R on the CPU; `seq` holds state slot numbers."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R], absolute, from 0
    seq: torch.Tensor  # int64 [R]
    want_logits: torch.Tensor  # bool [R]
    trial: bool = False  # the rows may be rejected: states do not move before a commit
    steered: bool = False  # a prompt's: where the lane routes prompts to resident experts, these rows are

    def __post_init__(self) -> None:
        rows = self.token_ids.shape[0]
        assert rows > 0, "a window has at least one row"
        assert all(t.shape == (rows,) for t in (self.positions, self.seq, self.want_logits))

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
    ) -> Window:
        """Rows of one sequence from absolute position `start`; `logits` is "none", "last" or "all"."""
        rows = len(token_ids)
        want = torch.full((rows,), logits == "all")
        if logits == "last":
            want[-1] = True
        return cls(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.arange(start, start + rows),
            torch.full((rows,), slot, dtype=torch.int64),
            want,
            trial,
            steered,
        )

    def runs(self) -> list[tuple[int, int, int]]:
        """(slot, first row, end row) of each sequence's contiguous rows, in window order."""
        slots, counts = torch.unique_consecutive(self.seq, return_counts=True)
        ends = counts.cumsum(0).tolist()
        return [(s, e - c, e) for s, c, e in zip(slots.tolist(), counts.tolist(), ends, strict=True)]
