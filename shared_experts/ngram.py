"""Reads rows of an n-gram table from a pack by positioned, buffered reads: the plain truth that `row_reader` equals.

Rows are fixed-size and never cross a 4 KiB page, so one row is one page of the page cache; repeated ids are read once.
Not here: which rows a token needs (the lane hashes), caching beyond the kernel's, reading ahead. Invariant: an id
outside the table is refused before anything is read.

Letters: N ids, C columns.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared_experts.codecs import F32Array, f32_from_bf16
from shared_experts.errors import NgramReadError
from shared_experts.manifest import NgramInfo

I64Array = npt.NDArray[np.int64]


class NgramTable:
    """One table, reading through a descriptor that the pack owns; safe to use from several threads."""

    def __init__(self, descriptor: int, info: NgramInfo, path: Path) -> None:
        self.info = info
        self._descriptor, self._path = descriptor, path

    def rows(self, ids: I64Array) -> F32Array:
        """The rows of `ids` [N] as fp32 [N, C]; raises NgramReadError, and ValueError for an id outside the table."""
        info = self.info
        check_ids(ids, info)
        distinct, places = np.unique(ids, return_inverse=True)
        pages, slots = np.divmod(distinct, info.rows_per_page)
        offsets = info.offset + pages * info.page_bytes + slots * info.row_bytes
        raw = np.empty((len(distinct), info.row_bytes), np.uint8)
        for index, offset in enumerate(offsets.tolist()):
            self._read(raw[index].data, offset)
        return decode_rows(raw, info)[places]

    def _read(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < buffer.nbytes:
            try:
                got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise NgramReadError(self._path, self.info.layer, offset, str(error.strerror)) from None
            if got == 0:
                raise NgramReadError(self._path, self.info.layer, offset, "the file became shorter")
            done += got


def check_ids(ids: I64Array, info: NgramInfo) -> None:
    """Raises ValueError unless `ids` is [N] int64 with every id in the table."""
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise ValueError(f"ids must be one-dimensional int64, not {ids.ndim}-dimensional {ids.dtype}")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= info.rows):
        raise ValueError(f"n-gram row ids must lie in 0..{info.rows - 1}, not {int(ids.min())}..{int(ids.max())}")


def decode_rows(raw: npt.NDArray[np.uint8], info: NgramInfo) -> F32Array:
    """Rows as stored [N, row_bytes] as fp32 [N, C]."""
    if info.dtype == "bf16":
        return f32_from_bf16(raw.view("<u2"))
    return raw.view("<f4" if info.dtype == "f32" else "<f2").astype(np.float32, copy=False)
