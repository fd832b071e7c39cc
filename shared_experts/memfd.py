"""Anonymous memory files: create one, map it for writing, seal it, reopen it for reading.

Not here: what the bytes mean (region.py) or who gets the descriptor (handoff.py).
Invariant: what `seal` returns is open O_RDONLY, can be neither written, grown, shrunk nor unsealed by anybody, and no
writable descriptor or mapping of it remains in this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

from shared_experts import host_memory
from shared_experts.errors import RegionError
from shared_experts.layout import align

MEMFD_LABEL = "expressway-experts"  # shows as /memfd:expressway-experts in /proc/<pid>/maps; it names no file
HUGE_PAGE_BYTES = 2 << 20
REQUIRED_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
THP_FROM_BYTES = 64 << 20  # below this, rounding up to 2 MiB costs more than the shorter page tables give

_MFD_HUGE_2MB = 21 << 26
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; older kernels say EINVAL


@dataclass(slots=True)
class WritableMemory:
    """A memfd that only this process can reach, mapped read-write; `seal` ends its life."""

    fd: int
    map: mmap.mmap
    page_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the file: the bytes asked for, rounded up to whole pages."""
        return len(self.map)

    def discard(self) -> None:
        """Gives the memory back. The caller has released every view of the map."""
        self.map.close()
        os.close(self.fd)


def create(size_bytes: int, *, huge_pages: bool = True) -> WritableMemory:
    """A fresh, zeroed memfd of at least `size_bytes`: 2 MiB pages when the pool has enough, else 4 KiB.

    Raises RegionError when this host has not the memory.
    """
    if huge_pages and host_memory.free_huge_pages() * HUGE_PAGE_BYTES >= size_bytes:
        # The shared map reserves its pages, so a pool that another process empties meanwhile is an error here and
        # never a SIGBUS later.
        with contextlib.suppress(OSError):
            return _create(align(size_bytes, HUGE_PAGE_BYTES), os.MFD_HUGETLB | _MFD_HUGE_2MB, HUGE_PAGE_BYTES)
    host_memory.require(size_bytes)
    try:
        memory = _create(align(size_bytes, mmap.PAGESIZE), 0, mmap.PAGESIZE)
    except OSError as error:
        raise RegionError(f"cannot create a memory file of {size_bytes} bytes: {error.strerror}") from error
    if size_bytes >= THP_FROM_BYTES:
        with contextlib.suppress(OSError):  # a kernel without shared huge pages; 4 KiB then
            memory.map.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _create(size_bytes: int, flags: int, page_bytes: int) -> WritableMemory:
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(MEMFD_LABEL, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(MEMFD_LABEL, flags)
    try:
        os.fchmod(fd, 0o400)  # nobody but us, and only for reading; the seals are what holds against ourselves
        os.ftruncate(fd, size_bytes)
        # Python's mmap keeps a duplicate of the descriptor until it is closed.
        return WritableMemory(
            fd, mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), page_bytes
        )
    except BaseException:
        os.close(fd)
        raise


def seal(memory: WritableMemory) -> int:
    """Unmaps, seals, and returns a new O_RDONLY descriptor; the writable one is closed.

    The kernel refuses F_SEAL_WRITE with EBUSY while any writable shared map lives, so a success proves there is none.
    """
    memory.map.close()
    try:
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
        return os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RegionError(f"cannot seal the region: {error.strerror}") from error
    finally:
        os.close(memory.fd)
