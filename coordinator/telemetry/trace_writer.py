"""Writes ended requests to files in one directory, a line each, off the event loop.

    requests-000001.jsonl … requests-00000N.jsonl     0600; the newest `limits.TRACE_FILES` are kept

Not here: what a line says (trace). Invariants: whoever serves never waits for a disk: at most `limits.TRACE_WAITING`
lines wait, and what does not fit, or cannot be written, is counted and lost; a file is opened by this object alone and
never longer than `limits.TRACE_FILE_BYTES`; nothing else in the directory is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

from coordinator import limits
from coordinator.errors import BadOption
from coordinator.telemetry.request_record import RequestRecord
from coordinator.telemetry.trace import line

log = structlog.get_logger()

_NAME: Final = re.compile(r"requests-(\d{6,12})\.jsonl")


class TraceWriter:
    """One per coordinator. Use `open`, and `close` at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = max(_numbers(folder), default=0)
        self._fd = -1
        self._room_bytes = self._file_bytes = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="traces")
        self._places = threading.BoundedSemaphore(limits.TRACE_WAITING)
        self._losing = threading.Lock()
        self.written = self.lost = 0

    @classmethod
    def open(cls, folder: Path) -> TraceWriter:
        """In a directory that is there. BadOption when nothing can be written to it."""
        try:
            writer = cls(folder)
            writer._next_file()
        except OSError as error:
            raise BadOption(f"--trace-requests {folder}: {error.strerror}") from None
        return writer

    def write(self, record: RequestRecord) -> None:
        """Soon. Call from the event loop; the record no longer changes."""
        if self._places.acquire(blocking=False):
            self._pool.submit(self._write, record)
        else:
            self._lose("too many lines wait for the disk")

    def close(self) -> None:
        """Writes what waits. Blocks for as long as that takes."""
        self._pool.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        log.info("traces of requests", written=self.written, lost=self.lost)

    def _write(self, record: RequestRecord) -> None:
        try:
            data = line(record).encode() + b"\n"
            if self._fd < 0 or len(data) > self._room_bytes:
                self._next_file()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._room_bytes -= len(data)
            self._file_bytes += len(data)
            self.written += 1
        except OSError as error:
            self._cut()
            self._lose(error.strerror or str(error))
        finally:
            self._places.release()

    def _lose(self, reason: str) -> None:
        with self._losing:
            self.lost += 1
            first = self.lost == 1
        if first:  # a full disk is no reason to fill it with complaints
            log.warning("traces of requests are being lost", reason=reason)

    def _cut(self) -> None:
        """Takes back a part of a line: a new file for each line of a full disk would push out the older ones."""
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, self._file_bytes)
        except OSError:
            self._room_bytes = 0  # the file may end inside a line: go on in another one

    def _next_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            self._number += 1
            with contextlib.suppress(FileExistsError):  # somebody else's since we looked
                self._fd = os.open(self._folder / f"requests-{self._number:06}.jsonl", flags, 0o600)
                break
        self._room_bytes, self._file_bytes = limits.TRACE_FILE_BYTES, 0
        for number in sorted(_numbers(self._folder))[: -limits.TRACE_FILES]:
            with contextlib.suppress(OSError):
                (self._folder / f"requests-{number:06}.jsonl").unlink()


def _numbers(folder: Path) -> list[int]:
    with os.scandir(folder) as entries:
        return [int(found[1]) for entry in entries if (found := _NAME.fullmatch(entry.name))]
