"""Routing traces: which experts every window used. A lane writes them (`--trace-routing`), bench/cache_policy reads.

    header, 64 bytes    magic "EXPROUTE", version u32, layers u32, experts u32, 0 u32, pack fingerprint [32], 0 u64
    a window            rows u32, distinct keys D u32, distinct experts per layer u16 [layers],
                        expert ids u16 [D] (ascending within a layer), rows of each u16 [D]

All little-endian. A decode window at the true size is 2 KB, a prompt chunk 98 KB. Never in it: tokens, prompts, times.
Not here: when a window ends (store) or what is made of a trace.

Invariant: every window is one append, so a file is whole windows, but for a last one cut short by the process's death,
which the reader drops. Anything else that does not parse is refused.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import structlog

from lanes import limits
from lanes.errors import TraceRefused
from lanes.experts.policy import Touched
from lanes.limits import MAX_TRACE_EXPERTS, MAX_TRACE_LAYERS, MAX_TRACE_ROWS

_log = structlog.get_logger(__name__)

_MAGIC, _VERSION = b"EXPROUTE", 1
_HEADER = struct.Struct("<8sIIII32sQ")
_WINDOW = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Whose routing it is."""

    layers: int
    experts: int
    fingerprint: bytes  # 32


def trace_path(place: Path, lane: str) -> Path:
    """The file to write: `place` itself or, when that is a folder, a name in it that no earlier lane has had."""
    return place / f"{lane}-{time.time_ns()}-{os.getpid()}.trace" if place.is_dir() else place


class TraceWriter:
    """A new file (never an old one), readable by its owner only. It must not fail a lane: on error or at the limit it
    stops, says so once, and the lane goes on."""  # fmt: skip

    def __init__(self, path: Path, header: TraceHeader, limit_bytes: int = limits.TRACE_BYTES) -> None:
        _check_size(header.layers, header.experts)
        self._layers, self._experts = header.layers, header.experts
        self._limit_bytes = limit_bytes
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._append(_HEADER.pack(_MAGIC, _VERSION, header.layers, header.experts, 0, header.fingerprint, 0))

    def record(self, touched: Touched) -> None:
        """Appends a finished window."""
        if self._file < 0:
            return
        layers, experts = np.divmod(touched.keys, self._experts)
        parts = (np.bincount(layers, minlength=self._layers), experts, touched.rows)
        head = _WINDOW.pack(touched.window_rows, len(experts))
        self._append(head + np.concatenate(parts).astype("<u2").tobytes())

    def close(self) -> None:
        """Brings it to the disk; safe to call twice."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.fsync(file)
            os.close(file)

    def _append(self, data: bytes) -> None:
        reason = f"{self._limit_bytes} bytes are written"
        if self._size + len(data) <= self._limit_bytes:
            try:
                written = os.write(self._file, data)
            except OSError as error:
                written, reason = 0, str(error.strerror)
            if written == len(data):
                self._size += written
                return
            if written:
                reason = "the disk is full"
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._size)
        _log.warning("routing_trace_ended", reason=reason, bytes=self._size)
        self.close()


@contextlib.contextmanager
def read_trace(path: Path) -> Iterator[tuple[TraceHeader, Iterator[Touched]]]:
    """The header and the windows, one at a time; raises TraceRefused, also from within the iteration."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limits.TRACE_BYTES:
            raise TraceRefused(f"a routing trace has at most {limits.TRACE_BYTES} bytes, this file {size}")
        header = _header(file.read(_HEADER.size))
        yield header, _windows(file, header, size)


def _header(data: bytes) -> TraceHeader:
    if len(data) < _HEADER.size:
        raise TraceRefused("no routing trace: it is shorter than a header")
    magic, version, layers, experts, zero, fingerprint, last = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise TraceRefused("no routing trace: it does not begin with EXPROUTE")
    if version != _VERSION or zero or last:
        raise TraceRefused(f"version {version} of routing traces is not known; this program reads {_VERSION}")
    _check_size(layers, experts)
    return TraceHeader(layers, experts, fingerprint)


def _check_size(layers: int, experts: int) -> None:
    if not (1 <= layers <= MAX_TRACE_LAYERS and 1 <= experts <= MAX_TRACE_EXPERTS):
        raise TraceRefused(f"{layers} layers of {experts} experts are out of range")


def _windows(file: BinaryIO, header: TraceHeader, size: int) -> Iterator[Touched]:
    number = 0
    while len(head := file.read(_WINDOW.size)) == _WINDOW.size:
        rows, distinct = _WINDOW.unpack(head)
        if not 1 <= rows <= MAX_TRACE_ROWS or distinct > header.layers * header.experts:
            raise TraceRefused(f"window {number}: {rows} rows and {distinct} experts are out of range")
        words = header.layers + 2 * distinct
        if 2 * words > size - file.tell():
            return
        body = file.read(2 * words)
        values = np.frombuffer(body, "<u2").astype(np.int64)
        per_layer, ids, counts = np.split(values, (header.layers, header.layers + distinct))
        if int(per_layer.sum()) != distinct:
            raise TraceRefused(f"window {number}: its layers have {per_layer.sum()} experts, its head says {distinct}")
        keys = ids + np.repeat(np.arange(header.layers) * header.experts, per_layer)
        if distinct and (ids.max() >= header.experts or (np.diff(keys) <= 0).any()):
            raise TraceRefused(f"window {number}: expert ids are out of range or not ascending")
        if distinct and not (counts.min() >= 1 and counts.max() <= rows):
            raise TraceRefused(f"window {number}: an expert has no row, or more than the window")
        yield Touched(keys, counts, rows)
        number += 1
