"""Rotations of the places where decode windows stand: made for many places at once, looked up for a few.

A dozen tensor operations for one row take longer than a look-up by far, and are in the way of the next window.
Not here: the angles' arithmetic (rows). Invariant: the same bits as `Rotary.at` has.

Letters: R rows, P rotated pairs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lanes.models.qwen4_exp.rows import Rotary

SPAN = 256  # places that are made at once


class Places:
    """Of one lane; `block` tokens of the indexer have one rotation."""

    def __init__(self, rotary: Rotary, block: int, rows: int, *, after: int = 0) -> None:
        """For windows of at most `rows` rows; row r is rotated as place r + `after` is."""
        self._rotary, self._block, self._span, self._after = rotary, block, SPAN + block + rows, after
        self._first, self._angles = 0, self._made(0)

    def into(self, angles: npt.NDArray[np.float32], start: int, rows: int) -> None:
        """angles fp32 [4, most R, P]: cos, sin of rows at start..; cos, sin of the first tokens of their blocks."""
        block = self._block
        if not self._first <= start - start % block <= start + rows <= self._first + self._span:
            self._first = start - start % block
            self._angles = self._made(self._first)
        for row, place in enumerate(range(start - self._first, start - self._first + rows)):
            angles[:, row] = self._angles[place]

    def _made(self, first: int) -> npt.NDArray[np.float32]:
        """[places, 4, P], from the first of a block on."""
        places = torch.arange(self._span)
        blocks = places - places % self._block
        own, of_block = (self._rotary.at(first + self._after + each) for each in (places, blocks))
        return torch.stack((*own, *of_block), dim=1).numpy()
