"""Writes the sections of a plan: steps are made by many threads ahead of one writer, which hashes beside writing.

A section is on disk and in the journal before the next one begins, so whatever ends a conversion costs at most the
section it was in. Not here: what is written (`pack_plan`).

Invariant: what `write` returns is the whole plan, every section on disk with the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shared_experts import limits
from shared_experts.codecs import U8Array
from shared_experts.journal import Journal
from shared_experts.manifest import Section
from shared_experts.pack import Progress
from shared_experts.pack_plan import PackPlan, PlannedSection
from shared_experts.temporary import refusing

BESIDE_BYTES = 512 << 10  # of a step that is hashed by another thread: a smaller one is done before that would wake up
AHEAD_STEPS = 6  # that may be made and wait for the writer while it waits for its disk
FLUSH_BYTES = 32 << 20  # written bytes go to the disk in such runs, so that the sync at a section's end has little left


class PackWriter:
    """Writes into one folder; close it, or use it as a context."""

    def __init__(self, folder: Path, plan: PackPlan, journal: Journal, threads: int, progress: Progress | None) -> None:
        self._folder, self._plan, self._journal, self._threads = folder, plan, journal, threads
        self._progress: Progress = progress or (lambda what, done, total: None)
        self._descriptors: dict[str, int] = {}
        self._done_bytes = 0

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def keep(self) -> tuple[Section, ...]:
        """Sections of the journal that are still whole: all their bytes are read and hashed again."""
        ends: dict[str, int] = {}
        for planned in self._plan.sections:
            ends[planned.file] = max(ends.get(planned.file, 0), planned.offset + planned.bytes)
        for name, end in ends.items():
            path = self._folder / name
            if path.exists() and path.stat().st_size > end:  # what is there is not of this plan
                os.truncate(path, end)
        with ThreadPoolExecutor(self._threads) as pool:
            found = tuple(pool.map(self._kept, self._plan.sections))
        kept = tuple(section for section in found if section is not None)
        self._done_bytes = sum(section.bytes for section in kept)
        return kept

    def write(self, kept: tuple[Section, ...]) -> tuple[Section, ...]:
        """Writes every section that is not in `kept`; all of them, in the order of the plan."""
        sections = {section.name: section for section in kept}
        missing = [planned for planned in self._plan.sections if planned.name not in sections]
        steps = ((planned, number) for planned in missing for number in range(planned.steps))
        # two more than there are processors: while they wait for the source's disk the others compute
        workers = self._threads + 2
        with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(1) as hasher:
            try:
                made = _in_order(pool, steps, workers + AHEAD_STEPS)
                for planned in missing:
                    self._journal.begin(planned.name)
                    section = self._write(planned, itertools.islice(made, planned.steps), hasher)
                    self._journal.finish(section)
                    sections[planned.name] = section
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return tuple(sections[planned.name] for planned in self._plan.sections)

    def write_small(self, name: str, data: bytes) -> None:
        """A whole file that is no section."""
        with refusing(self._folder / name):
            descriptor = self._open(name)
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, memoryview(data), 0)
            os.fsync(descriptor)
        self._progress(name, self._done_bytes, self._plan.total_bytes)

    def _write(self, planned: PlannedSection, steps: Iterator[U8Array], hasher: ThreadPoolExecutor) -> Section:
        digest, start, done, flushed = hashlib.sha256(), planned.offset, 0, 0
        with refusing(f"{self._folder / planned.file}: section {planned.name!r}"):
            descriptor = self._open(planned.file)
        for data in steps:
            view = data.data.cast("B")
            hashing = hasher.submit(digest.update, view) if len(view) >= BESIDE_BYTES else None
            with refusing(f"{self._folder / planned.file}: section {planned.name!r}"):
                _write_all(descriptor, view, start + done)
                done += len(view)
                if done - flushed >= FLUSH_BYTES:  # starts the writing of dirty pages, waits for nothing
                    os.posix_fadvise(descriptor, start + flushed, done - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = done
            if hashing is None:
                digest.update(view)
            else:
                hashing.result()
            self._done_bytes += len(view)
            self._progress(planned.name, self._done_bytes, self._plan.total_bytes)
        if done != planned.bytes:
            raise RuntimeError(f"section {planned.name} has {done} bytes, planned were {planned.bytes}")
        with refusing(f"{self._folder / planned.file}: section {planned.name!r}"):
            os.fsync(descriptor)
        return Section(planned.name, planned.file, planned.offset, planned.bytes, digest.digest())

    def _kept(self, planned: PlannedSection) -> Section | None:
        section = self._journal.done.get(planned.name)
        if section is None or (section.file, section.offset, section.bytes) != (
            planned.file, planned.offset, planned.bytes,
        ):  # fmt: skip
            return None
        digest = hashlib.sha256()
        block = memoryview(bytearray(min(planned.bytes, limits.BLOCK_BYTES)))
        try:
            with open(self._folder / planned.file, "rb", buffering=0) as file:
                for start in range(0, planned.bytes, limits.BLOCK_BYTES):
                    size = min(limits.BLOCK_BYTES, planned.bytes - start)
                    digest.update(block[: os.preadv(file.fileno(), [block[:size]], planned.offset + start)])
        except OSError:
            return None
        return section if digest.digest() == section.sha256 else None

    def _open(self, name: str) -> int:
        if name not in self._descriptors:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptors[name] = os.open(self._folder / name, flags, 0o666)
        return self._descriptors[name]


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _in_order(pool: ThreadPoolExecutor, steps: Iterator[tuple[PlannedSection, int]], most: int) -> Iterator[U8Array]:
    """Results in the order of the steps, with at most `most` begun or waiting."""
    running: deque[Future[U8Array]] = deque()
    for planned, number in steps:
        running.append(pool.submit(planned.step, number))
        if len(running) >= most:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()
