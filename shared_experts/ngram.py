"""Reads rows of an n-gram table from a pack by positioned, buffered reads.

Rows are fixed-size and never cross a 4 KiB page, so one row is one page of the page cache; repeated ids are read once.
Not here: which rows a token needs (the lane hashes) or caching beyond the kernel's. Invariant: an id outside the table
is refused before anything is read.

Letters: N ids, C columns.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared_experts.codecs import F32Array, f32_from_bf16
from shared_experts.errors import PackError
from shared_experts.manifest import NgramInfo


class NgramTable:
    """One table, reading through a descriptor that the pack owns; safe to use from several threads."""

    def __init__(self, descriptor: int, info: NgramInfo, path: Path) -> None:
        self.info = info
        self._descriptor, self._path = descriptor, path

    def rows(self, ids: npt.NDArray[np.int64]) -> F32Array:
        """The rows of `ids` [N] as fp32 [N, C]; raises ValueError for an id outside the table."""
        info = self.info
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise ValueError(f"ids must be one-dimensional int64, not {ids.ndim}-dimensional {ids.dtype}")
        if len(ids) == 0:
            return np.empty((0, info.columns), np.float32)
        if int(ids.min()) < 0 or int(ids.max()) >= info.rows:
            raise ValueError(f"n-gram row ids must lie in 0..{info.rows - 1}, not {int(ids.min())}..{int(ids.max())}")
        distinct, places = np.unique(ids, return_inverse=True)
        pages, slots = np.divmod(distinct, info.rows_per_page)
        offsets = info.offset + pages * info.page_bytes + slots * info.row_bytes
        raw = np.empty((len(distinct), info.row_bytes), np.uint8)
        for index, offset in enumerate(offsets.tolist()):
            self._read(raw[index].data, offset)
        return self._decode(raw)[places]

    def _read(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < buffer.nbytes:
            got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if got == 0:
                raise PackError(self._path, "the file became shorter", section=f"ngram.{self.info.layer}")
            done += got

    def _decode(self, raw: npt.NDArray[np.uint8]) -> F32Array:
        if self.info.dtype == "bf16":
            return f32_from_bf16(raw.view("<u2"))
        return raw.view("<f4" if self.info.dtype == "f32" else "<f2").astype(np.float32, copy=False)
