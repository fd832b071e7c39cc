"""The memory of the park pool: one memory file that the owner makes and every lane maps for reading and writing.

Not here: which segment is whose (park_index). Invariants: its size never changes (sealed), so a map of it never faults
past the end; it has no name; memory is taken only as segments are first written and given back when they are punched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from shared_experts import host_memory
from shared_experts.errors import ParkRefused, RegionError
from shared_experts.layout import align

LABEL = "expressway-park"
HUGE_PAGE_BYTES = 2 << 20
_MFD_HUGE_2MB = 21 << 26
_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ParkMemory:
    """A map of the pool; `segment` is a writable view."""

    def __init__(self, fd: int, segment_bytes: int) -> None:
        """Takes over `fd`. Raises ParkRefused where it is no pool."""
        self.fd, self.segment_bytes = fd, segment_bytes
        self.punches = self.touched_bytes = 0  # as the owner last said: memory given back so often, memory ever used
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ParkRefused("the pool's descriptor is not sealed against a change of its size")
            self.total_bytes = os.fstat(fd).st_size
            self.segments = self.total_bytes // segment_bytes
            self._map = mmap.mmap(fd, self.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ParkRefused(f"the pool cannot be mapped: {error}") from error
        except ParkRefused:
            os.close(fd)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)  # of the first segment, here

    @classmethod
    def create(cls, total_bytes: int, segment_bytes: int) -> ParkMemory:
        """A fresh pool: on 2 MiB pages where the host has set so many aside. Raises RegionError."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        huge = segment_bytes * 8 >= HUGE_PAGE_BYTES and host_memory.free_huge_pages() * HUGE_PAGE_BYTES >= total_bytes
        try:
            if huge:
                fd = os.memfd_create(LABEL, flags | os.MFD_HUGETLB | _MFD_HUGE_2MB)
                total_bytes = align(total_bytes, HUGE_PAGE_BYTES)
            else:
                fd = os.memfd_create(LABEL, flags)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            raise RegionError(f"cannot make a park pool of {total_bytes} bytes: {error.strerror}") from error
        return cls(fd, segment_bytes)

    def segment(self, number: int) -> Bytes:
        """The bytes of one segment; raises ParkRefused outside the pool."""
        if not 0 <= number < self.segments:
            raise ParkRefused("a segment outside the pool")
        return self._bytes[number * self.segment_bytes : (number + 1) * self.segment_bytes]

    def runs(self, segments: tuple[int, ...], size_bytes: int, border_bytes: int = 0) -> list[tuple[int, int]]:
        """(offset in the pool, bytes) of the first `size_bytes` in these segments, neighbours as one run.

        None goes over a multiple of `border_bytes`. Raises ParkRefused where they are too few, or outside.
        """
        if len(segments) * self.segment_bytes < size_bytes:
            raise ParkRefused("fewer segments than bytes")
        if segments and not 0 <= min(segments) <= max(segments) < self.segments:
            raise ParkRefused("a segment outside the pool")
        found: list[tuple[int, int]] = []
        if segments and segments == tuple(range(segments[0], segments[0] + len(segments))):  # side by side: most
            begin = segments[0] * self.segment_bytes
            end = begin + size_bytes
            while begin < end:
                border = (begin // border_bytes + 1) * border_bytes if border_bytes else end
                found.append((begin, min(end, border) - begin))
                begin = border
            return found
        for at, number in enumerate(segments):
            offset = number * self.segment_bytes
            part = min(self.segment_bytes, size_bytes - at * self.segment_bytes)
            if part <= 0:
                break
            last = found[-1] if found else (-1, 0)
            if sum(last) == offset and not (border_bytes and offset % border_bytes == 0):
                found[-1] = (last[0], last[1] + part)
            else:
                found.append((offset, part))
        return found

    def view(self, offset: int, size_bytes: int) -> Bytes:
        """The bytes of a run."""
        return self._bytes[offset : offset + size_bytes]

    def write(self, segments: tuple[int, ...], data: Bytes) -> None:
        """Fills segments in order; what is left of the last one is not touched."""
        assert len(segments) * self.segment_bytes >= data.shape[0]
        for at, number in enumerate(segments):
            part = data[at * self.segment_bytes : (at + 1) * self.segment_bytes]
            self.segment(number)[: part.shape[0]] = part

    def read(self, segments: tuple[int, ...], out: Bytes) -> None:
        """Copies from segments in order until `out` is full; raises ParkRefused where they are too few."""
        if len(segments) * self.segment_bytes < out.shape[0]:
            raise ParkRefused("fewer segments than bytes")
        for at, number in enumerate(segments):
            part = out[at * self.segment_bytes : (at + 1) * self.segment_bytes]
            part[:] = self.segment(number)[: part.shape[0]]

    def populate(self, offset: int, size_bytes: int) -> None:
        """Takes the memory of a run of whole pages; what is there stays. For a thread: it takes its time."""
        _libc.madvise(self.address + offset, size_bytes, _POPULATE_WRITE)  # an older kernel takes it when it is written

    def punch(self, numbers: list[int]) -> None:
        """Gives the memory of segments back to the host; they read as zeros."""
        for number in numbers:
            self.segment(number)  # in range
            _fallocate(self.fd, number * self.segment_bytes, self.segment_bytes)

    def close(self) -> None:
        """Unmaps and closes."""
        del self._bytes
        with contextlib.suppress(BufferError):  # a view is still held somewhere; the map goes with it
            self._map.close()
        os.close(self.fd)


def _fallocate(fd: int, offset: int, size_bytes: int) -> None:
    _libc.fallocate(fd, _PUNCH, offset, size_bytes)  # a file system that cannot keeps the memory: no harm
