"""Rows that several sequences may share, page by page, though each of them sees one contiguous tensor.

    file     [ pages of A ............ ][ pages of B ............ ]      a memory file without a name, sparse
    A's map    0 1 2 3 4 5                                               a branch of A at the middle of page 3:
    B's map    0 1 2 b3 b4                                               whole pages are A's own, mapped once more

Sharing is the page table's work: readers and writers of rows know nothing of it, addresses stay, no bit moves. Pages
have holders; a page is given back, and so zeroed, when its last holder lets go. Page numbers are never used again, so
every buffer owns a range of the file from the beginning and grows in one piece.

Not here: which sequences share (conversations), what is charged (pool). Invariants: a page with several holders is
never written with other bytes: who goes back behind its end takes pages of its own first (`private`); a map lives as
long as any tensor over it.

Letters: C columns (heads), P pages of a column.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt
import torch

from lanes.state.shape import Growing, StateShape

FILE_BYTES = 1 << 62
SMALL_PAGE_BYTES, PAGE_BYTES = mmap.PAGESIZE, 64 << 10  # larger ones where a sequence is: fewer to count
_LARGE_FROM_BYTES = 16 << 20  # of 1,024 tokens' rows
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_PROT, _SHARED_FIXED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10  # MAP_FIXED
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE

Pages = npt.NDArray[np.int64]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class PageMemory:
    """The file, and who holds its pages. One per pool; the engine's thread alone uses it."""

    def __init__(self, page_bytes: int = SMALL_PAGE_BYTES) -> None:
        assert page_bytes % mmap.PAGESIZE == 0
        self.page_bytes = page_bytes
        self.fd = os.memfd_create("expressway-state", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, FILE_BYTES)
        self._next = 0
        self._others: dict[int, int] = {}  # holders of a page beside its first
        self._saved = 0

    @classmethod
    def of(cls, shape: StateShape) -> PageMemory:
        """With pages of a size that suits these sequences."""
        large = shape.growing_bytes(1024) >= _LARGE_FROM_BYTES
        return cls(PAGE_BYTES if large else SMALL_PAGE_BYTES)

    @property
    def saved_bytes(self) -> int:
        """What all holders together would take more if nothing were shared."""
        return self._saved * self.page_bytes

    @property
    def taken_bytes(self) -> int:
        """What the file takes of the host's memory now."""
        return 512 * os.fstat(self.fd).st_blocks

    def fresh(self, count: int) -> int:
        """The first of `count` page numbers that nobody had."""
        first, self._next = self._next, self._next + count
        assert self._next * self.page_bytes <= FILE_BYTES
        return first

    def hold(self, pages: Pages) -> None:
        """One holder more for each."""
        for page in pages.ravel().tolist():
            self._others[page] = self._others.get(page, 0) + 1
        self._saved += pages.size

    def shared(self, pages: Pages) -> bool:
        """Whether any of them has several holders."""
        return bool(self._others) and any(page in self._others for page in pages.ravel().tolist())

    def drop(self, pages: Pages) -> None:
        """One holder less for each; pages without one are given back."""
        alone: list[int] = []
        for page in pages.ravel().tolist():
            others = self._others.pop(page, 0)
            if others > 1:
                self._others[page] = others - 1
            if others:
                self._saved -= 1
            else:
                alone.append(page)
        for first, count in _runs(np.array(alone, np.int64)):
            _libc.fallocate(self.fd, _PUNCH, first * self.page_bytes, count * self.page_bytes)

    def map(self, pages: Pages) -> mmap.mmap:
        """The columns' pages [C, P], one behind the other."""
        size = self.page_bytes
        whole = mmap.mmap(-1, pages.size * size, flags=_RESERVED, prot=_PROT)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        for first, count in _runs(pages.ravel()):
            at = ctypes.c_void_p(address)
            if _libc.mmap(at, count * size, _PROT, _SHARED_FIXED, self.fd, first * size) != address:
                raise MemoryError(f"pages of a conversation cannot be mapped: {os.strerror(ctypes.get_errno())}")
            address += count * size
        return whole

    def copy(self, source: int, target: int) -> None:
        """The bytes of one page into another."""
        os.pwrite(self.fd, os.pread(self.fd, self.page_bytes, source * self.page_bytes), target * self.page_bytes)


class PagedRows:
    """One buffer of one sequence; `tensor` is [heads, rows, width] or [rows, width], another one after every call."""

    __slots__ = ("_columns", "_memory", "_most_pages", "_of", "_own", "_pages", "_row_bytes", "tensor")

    def __init__(self, memory: PageMemory, of: Growing, most_tokens: int) -> None:
        self._memory, self._of = memory, of
        self._columns = max(1, of.heads)
        self._row_bytes = of.row_bytes() // self._columns
        self._most_pages = self._count(of.rows(0, most_tokens).stop)
        self._pages: Pages = np.zeros((self._columns, 0), np.int64)
        self._own = self._fresh()
        self.tensor = torch.empty(of.size(0), dtype=of.dtype)

    def resize(self, rows: int) -> None:
        """Room for that many rows, no fewer than now; nothing is copied."""
        have, wanted = self._pages.shape[1], self._count(rows)
        self._pages = np.concatenate((self._pages, self._own[:, None] + np.arange(have, wanted)), axis=1)
        self._map(rows)

    def share(self, source: PagedRows, rows: int) -> int:
        """A buffer without pages gets whole pages of the source's first `rows`; returns how many rows begin in them."""
        assert not self._pages.size
        whole = rows * self._row_bytes // self._memory.page_bytes
        self._pages = source._pages[:, :whole].copy()
        self._memory.hold(self._pages)
        return whole * self._memory.page_bytes // self._row_bytes

    def sharable_bytes(self, rows: int) -> int:
        """Of the first `rows`: what a branch need not take again."""
        size = self._memory.page_bytes
        return self._columns * (rows * self._row_bytes // size) * size

    def private(self, rows: int) -> None:
        """From now on rows from `rows` on may be written: what others hold of their pages is taken anew."""
        first, offset = divmod(rows * self._row_bytes, self._memory.page_bytes)
        late = self._pages[:, first:].copy()
        if not self._memory.shared(late):
            return
        self._own = self._fresh()
        self._pages[:, first:] = self._own[:, None] + np.arange(first, self._pages.shape[1])
        if offset:
            for old, new in zip(late[:, 0].tolist(), self._pages[:, first].tolist(), strict=True):
                self._memory.copy(old, new)
        self._memory.drop(late)
        self._map(self.tensor.shape[-2])

    def close(self) -> None:
        """Lets all pages go."""
        pages, self._pages = self._pages, self._pages[:, :0]
        self._memory.drop(pages)
        self.tensor = torch.empty(self._of.size(0), dtype=self._of.dtype)

    def _count(self, rows: int) -> int:
        return -(-rows * self._row_bytes // self._memory.page_bytes)

    def _fresh(self) -> Pages:
        """The first page of each column's range."""
        first = self._memory.fresh(self._columns * self._most_pages)
        return first + self._most_pages * np.arange(self._columns)

    def _map(self, rows: int) -> None:
        if not rows:
            return
        flat = torch.frombuffer(self._memory.map(self._pages), dtype=self._of.dtype)
        column = self._pages.shape[1] * self._memory.page_bytes // self._of.dtype.itemsize
        strides = (column, self._of.width, 1) if self._of.heads else (self._of.width, 1)
        self.tensor = flat.as_strided(self._of.size(rows), strides)


def _runs(pages: Pages) -> list[tuple[int, int]]:
    """(first, count) of pages that follow one another."""
    if not pages.size:
        return []
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    counts = np.diff(starts, append=pages.size)
    return list(zip(pages[starts].tolist(), counts.tolist(), strict=True))
