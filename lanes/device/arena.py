"""One piece of pinned host memory for the states that wait: taken at the start, cut into tensors, zeroed by a thread.

    [ rows of A | fixed of A | checkpoint | free ........ | rows of B | being zeroed | free ]

A tensor's place is free again once nothing refers to its memory and it was zeroed: by the thread, or by who needs a
place and finds none, since the thread gets what computing leaves. Where no place is large enough a tensor is plain
memory: slower to copy, and as good. Not here: what is charged (pool), copies (host).

Invariants: places never overlap; nobody gets a place that is not zero; whoever lets go waits for nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import math
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lanes.affinity import keep_to, step_back
from lanes.device.registered import Registered
from lanes.errors import HostMemoryTooSmall
from shared_experts import host_memory
from shared_experts.layout import align

ALIGNMENT_BYTES = 512
ZEROED_AT_ONCE_BYTES = 4 << 20  # so that the memory's bandwidth is left to others in between
ALIVE_S = 1.0  # between two looks whether the thread that is waited for still runs
ZEROING_THREADS = 4
ZEROED_AT_A_TIME_BYTES = 32 << 20  # the rest is there meanwhile for who needs a place
_Work = threading.Event | Callable[[], None] | None
_Dirty = deque[tuple[int, int]]  # (first, bytes), of places that nobody refers to and nobody has zeroed yet


class Arena:
    """`size_bytes` of memory, registered by `registered` where it can."""

    def __init__(self, size_bytes: int, registered: Registered | None, cores: Sequence[int] = ()) -> None:
        """Raises HostMemoryTooSmall. `cores`: where threads may run that somebody waits for."""
        self.size_bytes = align(size_bytes, mmap.PAGESIZE)
        try:
            self._map = mmap.mmap(-1, max(self.size_bytes, mmap.PAGESIZE))
        except (OSError, OverflowError) as error:
            raise HostMemoryTooSmall(_refusal(self.size_bytes, "the kernel refuses them")) from error
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        registers = registered is not None and registered.tries(self._address)
        if registers:  # which takes every page of it; plain memory is taken as it is used
            _require(self.size_bytes)
        self.pinned = registers and registered is not None and registered.add(self._address, len(self._map))
        self._registered, self._cores = registered, tuple(cores)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)]  # (first, end), ascending, never adjacent
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._dirty: _Dirty = deque()
        mine = (self._work, self._dirty, self._bytes, weakref.WeakMethod(self._give))
        self._thread = threading.Thread(target=_run, args=mine, name="state-arena", daemon=True)
        self._thread.start()
        left = (self._work, self._thread, registered, self._bytes)
        weakref.finalize(self, _forgotten, *left).atexit = False

    @property
    def free_bytes(self) -> int:
        """That are zero and nobody's."""
        with self._lock:
            return sum(end - first for first, end in self._free)

    def allocate(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory of the arena; plain memory with any contents where it has no place."""
        size_bytes = math.prod(size) * dtype.itemsize
        found = self.place(size_bytes) if size_bytes else None
        if found is None and size_bytes:
            self.flush()
            found = self.place(size_bytes)
        return torch.empty(size, dtype=dtype) if found is None else found.view(dtype).view(size)

    def place(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes in one piece, zero, if there are now."""
        first = self._take(size_bytes)
        if first is None and (first := self._zeroed_here(size_bytes)) is None:
            return None
        view = self._bytes[first : first + size_bytes]
        left = (first, align(size_bytes, ALIGNMENT_BYTES))
        weakref.finalize(view, _let_go, self._dirty, self._work, left).atexit = False
        return torch.from_numpy(view)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._address < self.size_bytes

    def later(self, work: Callable[[], None]) -> None:
        """The thread calls it, and lets go of what it refers to."""
        self._work.put(work)

    def flush(self) -> None:
        """Until the thread has done what it was given, or has ended: by a copy that failed."""
        done = threading.Event()
        self._work.put(done)
        while not done.wait(ALIVE_S) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Ends the thread and gives the registration back; tensors may live on."""
        self._work.put(None)
        self._thread.join()
        if self.pinned and self._registered is not None:
            self._registered.drop(self._address)

    def _take(self, size_bytes: int) -> int | None:
        """The first place that is large enough."""
        size_bytes = align(size_bytes, ALIGNMENT_BYTES)
        with self._lock:
            for at, (first, end) in enumerate(self._free):
                if end - first >= size_bytes:
                    left = (first + size_bytes, end)
                    self._free[at : at + 1] = [left] if left[0] < end else []
                    return first
        return None

    def _zeroed_here(self, size_bytes: int) -> int | None:
        """A place of what waits to be zeroed, by this thread."""
        size_bytes = align(size_bytes, ALIGNMENT_BYTES)
        for _ in range(len(self._dirty)):
            try:
                first, room_bytes = self._dirty.popleft()
            except IndexError:  # the thread was faster
                break
            if room_bytes < size_bytes:
                _let_go(self._dirty, self._work, (first, room_bytes))
                continue
            if room_bytes > size_bytes:
                _let_go(self._dirty, self._work, (first + size_bytes, room_bytes - size_bytes))
            _zero(self._address + first, size_bytes, self._cores)
            return first
        return None

    def _give(self, first: int, end: int) -> None:
        with self._lock:
            at = bisect.bisect(self._free, (first, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == first:
                at -= 1
                first = self._free.pop(at)[0]
            self._free.insert(at, (first, end))


def _let_go(dirty: _Dirty, work: queue.SimpleQueue[_Work], place: tuple[int, int]) -> None:
    """By whatever thread, also in the middle of something: no lock is taken."""
    dirty.append(place)
    work.put(_nothing)  # the thread looks


def _zero(address: int, size_bytes: int, cores: Sequence[int]) -> None:
    """Much of it by a few threads: one has a tenth of the memory's rate, and computing waits."""
    count = min(ZEROING_THREADS, len(cores) or len(os.sched_getaffinity(0)), size_bytes // ZEROED_AT_A_TIME_BYTES)
    if count < 2:
        ctypes.memset(address, 0, size_bytes)
        return

    def part(number: int) -> None:
        keep_to(cores)  # not that of who waits, which it begins on
        begin, end = (size_bytes * each // count for each in (number, number + 1))
        ctypes.memset(address + begin, 0, end - begin)

    threads = [threading.Thread(target=part, args=(number,), name="state-zero", daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _nothing() -> None:
    pass


def _forgotten(
    work: queue.SimpleQueue[_Work], thread: threading.Thread, registered: Registered | None,
    memory: npt.NDArray[np.uint8],
) -> None:  # fmt: skip
    """Who forgets to close an arena leaves no thread, and no registration of memory that goes: whatever came to lie at
    its addresses would be copied to the device from the pages that were there before."""
    work.put(None)
    if thread is not threading.current_thread():
        thread.join()  # which awaits copies that are under way
    if registered is not None:
        registered.drop(memory.ctypes.data)


def _require(size_bytes: int) -> None:
    left_bytes = max(0, host_memory.available_bytes() - host_memory.floor_bytes())
    if size_bytes > left_bytes:
        raise HostMemoryTooSmall(_refusal(size_bytes, f"{left_bytes >> 20} MiB can be had"))


def _refusal(size_bytes: int, why: str) -> str:
    return (
        f"--state-budget and one conversation of --context tokens take {-(-size_bytes >> 20)} MiB of host memory, "
        f"and {why}: give less of either"
    )


def _run(
    given: queue.SimpleQueue[_Work], dirty: _Dirty, memory: npt.NDArray[np.uint8],
    give: weakref.WeakMethod[Callable[[int, int], None]],
) -> None:  # fmt: skip
    """The thread of an arena that may be gone."""
    step_back()  # nobody waits for it but who has no memory
    while (work := given.get()) is not None:
        if isinstance(work, threading.Event):
            work.set()
        else:
            work()
        del work
        while dirty:
            try:
                first, size_bytes = dirty.popleft()
            except IndexError:  # who needs it was faster
                break
            end = first + min(size_bytes, ZEROED_AT_A_TIME_BYTES)
            if end < first + size_bytes:
                dirty.appendleft((end, first + size_bytes - end))
            for at in range(first, end, ZEROED_AT_ONCE_BYTES):
                ctypes.memset(memory.ctypes.data + at, 0, min(ZEROED_AT_ONCE_BYTES, end - at))  # without the lock
            if (back := give()) is not None:
                back(first, end)
            del back
