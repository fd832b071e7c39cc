"""The fast twin of `ngram.NgramTable`: rows read ahead by native threads, through a bounded cache.

A ctypes binding of `native_rows`, and the choice of how the file is read: O_DIRECT pages where the file system takes
them, else through the page cache (`mode` says which). Not here: which rows a token needs (the lane hashes), and the
pack's own checks. Invariant: `rows` returns the file's bytes or raises; a row that could not be read whole is never
handed out.

Letters: N ids, C columns.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from shared_experts.codecs import F32Array
from shared_experts.errors import NativeMissing, NgramReadError
from shared_experts.manifest import PAGE_BYTES, NgramInfo
from shared_experts.ngram import I64Array, check_ids, decode_rows

DEFAULT_CACHE_BYTES = 64 << 20
DEFAULT_DEPTH = 32  # reads in flight; with 16 a measured disk gave 78 % of its rate, with 64 no more than with 32

ROW_BOOKKEEPING_BYTES = 56  # of a cached row, beside the row

Source = Callable[[int, int, int, int], int]  # (descriptor, address, bytes, offset) -> bytes read or a negative errno

_ABI = 2
_BAD_ARGUMENT, _NO_MEMORY, _NO_THREADS, _FAULT, _ABSENT = 1, 2, 3, 4, 5
_KINDS = {"bf16": 0, "f16": 1, "f32": 2}  # of rows.h
_SOURCE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


class _Table(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("rows", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint64),
        ("rows_per_page", ctypes.c_uint64),
        ("page_bytes", ctypes.c_uint64),
        ("cache_bytes", ctypes.c_uint64),
        ("source", _SOURCE),
    )


class _Taking(ctypes.Structure):
    _fields_ = (
        ("reader", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("offset", ctypes.c_uint64),
        ("got", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


def cache_bytes(info: NgramInfo, ahead_rows: int) -> int:
    """The least cache with which so many rows can be prefetched before one of them is asked for: half of it may be."""
    return 2 * ahead_rows * (info.row_bytes + ROW_BOOKKEEPING_BYTES)


@dataclass(frozen=True, slots=True)
class RowCounters:
    """Since the reader was opened; of `asked` rows, `hits` and `ahead` did not wait. In the order of rows.h."""

    asked: int = 0
    hits: int = 0  # in memory because they had been asked for before
    ahead: int = 0  # in memory because they were prefetched
    prefetched: int = 0  # reads begun by `prefetch`
    dropped: int = 0  # ids that `prefetch` passed over because too many were ahead already
    reads: int = 0  # of pages
    read_bytes: int = 0
    wait_ns: int = 0  # that `rows` slept
    capacity_rows: int = 0
    cached_rows: int = 0  # now
    in_flight: int = 0  # now: reads begun or queued


class RowReader:
    """One table. One thread asks for rows at a time, and one prefetches (others wait for it, and so does `close`).

    The native threads do not survive a fork: in a child every call raises.
    """

    def __init__(
        self,
        descriptor: int,
        info: NgramInfo,
        path: Path,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        depth: int = DEFAULT_DEPTH,
        source: Source | None = None,
    ) -> None:
        """Opens the file behind `descriptor` (which stays the caller's) a second time; `source` stands in for pread."""
        self.info, self._path, self._pid = info, path, os.getpid()
        self._handle: ctypes.c_void_p | None = None
        self._place = ctypes.c_void_p()  # the handle, for calls that keep the interpreter's lock; null before `close`
        self._asking, self._prefetching = Lock(), Lock()
        self._library = _load()
        self._source = _SOURCE(source) if source is not None else _SOURCE()  # lives as long as the threads
        self._descriptor, self.mode = _open_pages(descriptor, info, path)
        table = _Table(
            self._descriptor, depth, info.rows, info.offset, info.row_bytes, info.rows_per_page, info.page_bytes,
            cache_bytes, self._source,
        )  # fmt: skip
        handle = ctypes.c_void_p()
        code = self._library.rows_open(ctypes.byref(table), ctypes.byref(handle))
        if code:
            os.close(self._descriptor)
            if code == _NO_MEMORY:
                raise MemoryError(f"{path}: {cache_bytes} bytes for a cache of rows cannot be allocated")
            if code == _NO_THREADS:
                raise OSError(errno.EAGAIN, "no thread can be started to read rows", str(path))
            raise ValueError(f"rows_open refused {info} with a depth of {depth}")
        self._handle, self._place.value = handle, handle.value

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads, once the reads they have begun are over, and closes the file; twice is once."""
        if self._handle is None or self._pid != os.getpid():
            return
        with self._asking, self._prefetching:
            handle, self._handle, self._place.value = self._handle, None, None
            if handle is not None:
                self._library.rows_close(handle)
                os.close(self._descriptor)

    def rows(self, ids: I64Array) -> F32Array:
        """The rows of `ids` [N] as fp32 [N, C]; waits for those that are not there yet.

        Raises NgramReadError, and ValueError for an id outside the table.
        """
        raw = np.empty((len(ids), self.info.row_bytes), np.uint8)
        self.read(ids, raw)
        return decode_rows(raw, self.info)

    def read(self, ids: I64Array, into: npt.NDArray[np.uint8]) -> None:
        """`rows` as they are stored, into [N, row bytes], contiguous; the interpreter is free meanwhile."""
        ids = self._contiguous(ids)
        assert into.shape == (len(ids), self.info.row_bytes)
        assert into.flags.c_contiguous
        fault = _Fault()
        with self._held(self._asking) as handle:
            code = self._library.rows_get(handle, ids.ctypes.data, len(ids), into.ctypes.data, ctypes.byref(fault))
        if code == _BAD_ARGUMENT:
            check_ids(ids, self.info)
        if code == _FAULT:
            raise NgramReadError(self._path, self.info.layer, fault.offset, self._reason(fault))
        if code:
            raise MemoryError(f"{len(ids)} rows")

    def taker(self, ids: I64Array, out: F32Array) -> Callable[[int], bool]:
        """`take(n)`: the first n of `ids` [N] are read, as they are then, and `out` fp32 [N, C] has their rows.

        For few rows and often: its arguments are made once, and where all rows are in memory it keeps the interpreter.
        It raises nothing: False where `rows`, asked for the same ids, would say what is wrong.
        """
        assert ids.dtype == np.int64
        assert out.dtype == np.float32
        assert out.shape == (*ids.shape, self.info.columns)
        assert ids.flags.c_contiguous
        assert out.flags.c_contiguous
        place, kind = ctypes.addressof(self._place), _KINDS[self.info.dtype]
        taking = _Taking(place, ids.ctypes.data, out.ctypes.data, kind)
        at_once, waiting, asking = self._library.take_at_once, self._library.rows_take, self._asking
        said, most, kept = ctypes.byref(taking), len(ids), (ids, out, self._place)

        def take(rows: int) -> bool:
            assert rows <= most
            assert kept
            code = at_once(said, rows, 0)
            if code == _ABSENT and self._handle is not None and self._pid == os.getpid():
                with asking:
                    code = waiting(said, rows, 1)
            return bool(code == 0)

        return take

    def prefetch(self, ids: I64Array) -> None:
        """Begins to read the rows of `ids` [N] that are not there; never waits for the disk, never fails for it.

        At most half of the cache is ahead of `rows`; ids beyond that are passed over. Raises ValueError for an id
        outside the table.
        """
        ids = self._contiguous(ids)
        with self._held(self._prefetching) as handle:
            code = self._library.rows_prefetch(handle, ids.ctypes.data, len(ids))
        if code == _BAD_ARGUMENT:
            check_ids(ids, self.info)

    def forget(self) -> None:
        """What was prefetched is no longer expected: ids whose reads have not begun leave the queue."""
        self._library.rows_forget(self._open())

    def counters(self) -> RowCounters:
        """What was counted so far."""
        counters = np.empty(len(RowCounters.__slots__), np.uint64)
        self._library.rows_count(self._open(), counters.ctypes.data)
        return RowCounters(*counters.tolist())

    def _contiguous(self, ids: I64Array) -> I64Array:
        """The same ids, one after another in memory; their range is the native code's to check."""
        if ids.ndim != 1 or ids.dtype != np.int64:
            check_ids(ids, self.info)
        return np.ascontiguousarray(ids)

    @contextmanager
    def _held(self, lock: Lock) -> Iterator[ctypes.c_void_p]:
        """The open reader, which is not closed meanwhile."""
        self._open()  # in a child the lock may be held for good
        with lock:
            yield self._open()

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError(f"{self._path}: this reader is closed")
        if self._pid != os.getpid():
            raise ValueError(f"{self._path}: this reader belongs to process {self._pid}; open another after a fork")
        return self._handle

    def _reason(self, fault: _Fault) -> str:
        if fault.error:
            return os.strerror(fault.error)
        return f"the file became shorter: {fault.got} of {self.info.page_bytes} bytes"


def _open_pages(descriptor: int, info: NgramInfo, path: Path) -> tuple[int, str]:
    """(descriptor, mode): the same file, for direct reads if its first page can be read that way, else buffered."""
    modes = (("direct", os.O_DIRECT), ("buffered", 0))
    for mode, flag in modes:
        try:
            # Through /proc, so that it is the file that the pack has checked whatever happened to its name.
            opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flag)
            try:
                with mmap.mmap(-1, PAGE_BYTES) as page:  # aligned as direct reads want it
                    os.preadv(opened, [page], info.offset)
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_RANDOM)  # no neighbour of a row is worth reading
            except BaseException:
                os.close(opened)
                raise
            return opened, mode
        except OSError as error:
            if error.errno != errno.EINVAL or (mode, flag) == modes[-1]:
                reason = f"cannot be read: {error.strerror}"
                raise NgramReadError(path, info.layer, info.offset, reason) from None
    raise AssertionError("unreachable")


def read_pages(descriptor: int, offsets: I64Array, page_bytes: int, depth: int) -> I64Array:
    """Nanoseconds that each of these page reads took, `depth` at a time: the device by itself, for measurements."""
    took = np.empty(len(offsets), np.int64)
    offsets = np.ascontiguousarray(offsets, np.int64)
    code = _load().rows_read_pages(descriptor, offsets.ctypes.data, len(offsets), page_bytes, depth, took.ctypes.data)
    if code:
        raise OSError(code, os.strerror(code))
    return took


def check_library() -> None:
    """Raises NativeMissing where the library was not built."""
    _load()


@functools.cache
def _load() -> ctypes.CDLL:
    """The library beside this package; raises NativeMissing where it was not built."""
    folder = Path(__file__).parent / "native_rows"
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"librows{suffix}"
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            library.rows_abi.restype = ctypes.c_int32
            if library.rows_abi() != _ABI:
                raise NativeMissing(f"{path}: is of another version; reinstall the package")
            pointer, count = ctypes.c_void_p, ctypes.c_int64
            library.rows_open.argtypes = [pointer, pointer]
            library.rows_get.argtypes = [pointer, pointer, count, pointer, pointer]
            library.rows_prefetch.argtypes = [pointer, pointer, count]
            library.rows_take.argtypes = [pointer, count, ctypes.c_int32]
            # The same without giving the interpreter away, which somebody else would keep for milliseconds.
            at_once = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, count, ctypes.c_int32)(("rows_take", library))
            library.take_at_once = at_once  # type: ignore[attr-defined]
            library.rows_count.argtypes = [pointer, pointer]
            library.rows_read_pages.argtypes = [
                ctypes.c_int32, pointer, count, ctypes.c_uint64, ctypes.c_int32, pointer,
            ]  # fmt: skip
            for name in ("rows_close", "rows_forget"):
                getattr(library, name).argtypes = [pointer]
                getattr(library, name).restype = None
            library.rows_count.restype = None
        except (OSError, AttributeError) as error:
            raise NativeMissing(f"{path}: cannot be loaded ({error}); reinstall the package") from None
        return library
    raise NativeMissing(f"{folder}: librows was not built; install g++ and reinstall the package")
