"""Writes the files of a pack one after another, hashing each section on the way.

Not here: what is written (`convert`). Invariant: a file that was left without an error is on disk (fsync) and every
section of it is in `sections` with its offset, size and digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shared_experts.manifest import Section
from shared_experts.pack import Progress

if TYPE_CHECKING:
    from hashlib import _Hash


class SectionWriter:
    """One open file at a time; `with writer.file(name)`, inside it `with writer.section(name)` and `write`."""

    def __init__(self, folder: Path, sections: list[Section], total: int, progress: Progress | None) -> None:
        self._folder, self._sections, self._total, self._progress = folder, sections, total, progress
        self._descriptor, self._offset, self._file, self._what = -1, 0, "", ""
        self._digest: _Hash | None = None
        self.done_bytes = 0

    @contextmanager
    def file(self, name: str) -> Iterator[None]:
        """Creates a file; syncs and closes it at the end."""
        self._file = self._what = name
        self._offset = 0
        self._descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What is written inside is one section."""
        start, self._digest, self._what = self._offset, hashlib.sha256(), name
        yield
        self._sections.append(Section(name, self._file, start, self._offset - start, self._digest.digest()))
        self._digest = None

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        if self._digest is not None:
            self._digest.update(view)
        self._offset += len(view)
        self.done_bytes += len(view)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        if self._progress is not None:
            self._progress(self._what, self.done_bytes, self._total)
