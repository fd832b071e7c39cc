"""Keeps the pool's conversations on disk too: a thread that writes what was parked, and reads it back after a start.

    parked ──▶ pinned ──▶ written by the thread ──▶ let go
    start  ──▶ files, latest first ──▶ the pool, while it has room

Not here: files (park_disk), the index (park_index). The thread that owns the index calls, and never waits for a disk
but at the start. Invariants: one conversation is written at a time, pinned while it is; what a disk refuses costs its
copy there.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

import numpy as np
import structlog

from shared_experts import park_digest
from shared_experts.errors import ParkError, ParkRefused
from shared_experts.park_disk import ParkDisk, Saved, longer_form
from shared_experts.park_index import Blob, Entry, ParkIndex
from shared_experts.park_memory import Bytes, ParkMemory

HOLDER = "disk"
SHARE = 0.75  # of the pool that is filled at a start

_log = structlog.get_logger(__name__)


class ParkKeeper:
    """Used by the thread of the index; `on_done` is called from the writing thread."""

    def __init__(self, disk: ParkDisk, index: ParkIndex, memory: ParkMemory, on_done: Callable[[], None]) -> None:
        self._disk, self._index, self._memory, self._on_done = disk, index, memory, on_done
        self._work: queue.SimpleQueue[tuple[Entry, Saved] | None] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[tuple[Entry, Saved | None]] = queue.SimpleQueue()
        self._seen = 0  # changes of the index up to this number were looked at
        self._files: dict[str, Saved] = {}
        self._busy = False
        self._thread = threading.Thread(target=self._write, name="park-disk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the conversation that is being written."""
        self._work.put(None)
        self._thread.join()

    def load(self) -> int:
        """Puts into the pool what the disk has, while there is room; returns how many conversations."""
        loaded: list[tuple[int, bytes]] = []
        room = int(SHARE * self._index.segments) * self._index.segment_bytes
        for saved, parts in self._disk.load():
            needed = sum(-(-size // self._index.segment_bytes) for _, size in saved.parts) * self._index.segment_bytes
            if self._index.used_segments * self._index.segment_bytes + needed > room:
                continue  # a smaller one may still fit
            try:
                answers = self._index.lease(HOLDER, saved.tenant, saved.parts)
                for segments, data in zip(answers, parts, strict=True):
                    if isinstance(segments, tuple):
                        self._memory.write(segments, data)
                number = self._index.publish(HOLDER, saved.tenant, saved.pages, saved.marks)
            except ParkError as error:
                self._index.abandon(HOLDER)
                _log.warning("park_file_refused", file=saved.name, reason=str(error))
                self._disk.remove(saved)
                continue
            self._files[saved.name] = saved
            loaded.append((number, saved.tenant))
        for number, tenant in reversed(loaded):  # the latest is the one used last
            self._index.pin(HOLDER, number, tenant)
            self._index.unpin(HOLDER, number)
        return len(loaded)

    def look(self) -> None:
        """Takes over what was written, and gives the next conversation to the thread."""
        while not self._written.empty():
            entry, saved = self._written.get()
            self._busy = False
            self._index.unpin(HOLDER, entry.number)
            if saved is not None:
                self._replace(saved)
        if self._busy:
            return
        changes = self._index.changes(self._seen)
        if changes.void:  # too long ago: from the beginning
            self._seen = 0
        for entry in changes.entries:
            self._seen = entry.changed
            saved = _saved(entry)
            if saved.name not in self._files:
                self._index.pin(HOLDER, entry.number, entry.tenant)
                self._busy = True
                self._work.put((entry, saved))
                return

    def _replace(self, saved: Saved) -> None:
        """The file is there; those of the same conversation's earlier turns go."""
        for name, old in list(self._files.items()):
            if longer_form(old, saved):
                self._disk.remove(old)
                del self._files[name]
        self._files[saved.name] = saved

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            entry, saved = work
            done: Saved | None = saved
            try:
                self._disk.save(saved, functools.partial(self._bytes, entry.blobs()))
            except (OSError, ParkError) as error:
                _log.warning("park_disk_failed", reason=str(error))
                done = None
            self._written.put((entry, done))
            self._on_done()

    def _bytes(self, blobs: list[Blob], part: int) -> Bytes:
        data = np.empty(blobs[part].size_bytes, np.uint8)
        self._memory.read(blobs[part].segments, data)
        if park_digest.of_bytes(data) != blobs[part].digest:
            raise ParkRefused("a part was damaged in the pool")
        return data


def _saved(entry: Entry) -> Saved:
    parts = tuple((blob.digest, blob.size_bytes) for blob in entry.blobs())
    return Saved(entry.tenant, len(entry.pages), tuple(entry.marks), parts)
