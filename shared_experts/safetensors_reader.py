"""Reads one safetensors file: a bounded parser of its header, and positioned reads of its bytes.

Nothing is mapped and nothing is kept but the header, so a reader's memory is what its caller asks for. Not here: what
the tensors mean. Invariant: every `TensorInfo` lies wholly inside the file, has exactly the bytes its shape and dtype
need, and shares no byte with another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shared_experts import limits
from shared_experts.errors import StorageError
from shared_experts.fields import parse_json

PAGE_BYTES = 4096
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8}
_OTHER_DTYPES = frozenset(("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "F64", "F8_E5M2", "F8_E8M0"))


class Refusal(Protocol):
    """Makes the exception for a reason, with the tensor's name where there is one."""

    def __call__(self, reason: str, tensor: str | None = None) -> Exception:
        """The exception to raise."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int
    bytes: int


def open_regular(path: Path, fail: Callable[[str], Exception], *, follow: bool) -> tuple[int, int]:
    """(descriptor, size) of a regular file, opened for reading without ever blocking; `fail` makes the error."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        linked = error.errno == errno.ELOOP and not follow
        reason = "a symbolic link; the file itself must be here" if linked else error.strerror
        raise fail(f"cannot be opened: {reason}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise fail("is not a regular file")
    return descriptor, status.st_size


class SafetensorsFile:
    """An open file and its tensors by name; close it, or use it as a context."""

    def __init__(self, path: Path, refusal: Refusal, *, follow: bool = True) -> None:
        self.path, self._refusal = path, refusal
        self.descriptor, self.size = open_regular(path, refusal, follow=follow)
        try:
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor; twice is once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def bypass_cache(self) -> None:
        """Reads come straight from the disk from now on, where the file system allows it.

        Copying through the page cache costs more processor time per byte than anything else in a conversion but the
        quantiser itself: measured 0.8 ms per MiB against 0.06 ms.
        """
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)

    def read(self, info: TensorInfo, start: int, count: int, buffer: memoryview) -> memoryview:
        """`count` bytes of a tensor from `start`, as a view into `buffer`; a short file is refused.

        The buffer starts on a page and has two pages more than `count`, because whole pages are read.
        """
        assert 0 <= start <= start + count <= info.bytes
        assert buffer.nbytes >= count + 2 * PAGE_BYTES
        first = info.offset + start
        skip = first % PAGE_BYTES
        wanted = skip + count
        whole = buffer[: -(-wanted // PAGE_BYTES) * PAGE_BYTES]
        done = 0
        while done < wanted:
            try:
                got = os.preadv(self.descriptor, [whole[done:]], first - skip + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._through_cache():
                    continue
                reason = f"tensor {info.name!r}: cannot be read: {error.strerror}"
                raise StorageError(f"{self.path}: {reason}") from None
            if got == 0 or (done + got < wanted and got % PAGE_BYTES):
                raise self._refusal("the file became shorter while it was read", info.name)
            done += got
        return buffer[skip:wanted]

    def _through_cache(self) -> bool:
        """Undoes `bypass_cache`, on a file system that wants other sizes; whether there was anything to undo."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def _parse(self) -> dict[str, TensorInfo]:
        if self.size < 8:
            raise self._refusal(f"truncated: {self.size} bytes are too few for a header")
        length = int.from_bytes(os.pread(self.descriptor, 8, 0), "little")
        if length > limits.HEADER_BYTES:
            raise self._refusal(f"the header says it has {length} bytes; at most {limits.HEADER_BYTES} are read")
        if 8 + length > self.size:
            raise self._refusal(f"truncated: the header has {length} bytes, the file {self.size}")
        text = os.pread(self.descriptor, length, 8)
        self.header_sha256 = hashlib.sha256(text).hexdigest()
        header = parse_json(text, self._refusal)
        if type(header) is not dict:
            raise self._refusal("the header is not a map")
        metadata = header.pop("__metadata__", {})
        if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
            raise self._refusal("__metadata__ is not a map of strings")
        if len(header) > limits.TENSORS:
            raise self._refusal(f"{len(header)} tensors; at most {limits.TENSORS} are read")
        tensors = {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}
        self._check_overlap(tensors, 8 + length)
        return tensors

    def _tensor(self, name: str, entry: object, data_start: int) -> TensorInfo:
        shown = name if len(name) <= 80 else name[:77] + "..."
        if not name or len(name.encode("utf-8", "replace")) > limits.TENSOR_NAME_BYTES or not name.isprintable():
            raise self._refusal(f"the name is not 1..{limits.TENSOR_NAME_BYTES} printable bytes", shown)
        if type(entry) is not dict or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._refusal("the entry is not exactly dtype, shape and data_offsets", shown)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in DTYPE_BYTES:
            known = isinstance(dtype, str) and dtype in _OTHER_DTYPES
            kind = f"dtype {dtype} is not read" if known else f"unknown dtype {str(dtype)[:40]!r}"
            raise self._refusal(f"{kind}; a checkpoint's weights must be F32, F16, BF16 or F8_E4M3", shown)
        if type(shape) is not list or len(shape) > limits.DIMENSIONS:
            raise self._refusal(f"the shape is not a list of at most {limits.DIMENSIONS} sizes", shown)
        if any(type(size) is not int or not 0 < size <= limits.NGRAM_ROWS for size in shape):
            raise self._refusal(f"the shape {str(shape)[:80]} has a size that is no positive integer in range", shown)
        if type(offsets) is not list or len(offsets) != 2 or any(type(o) is not int or o < 0 for o in offsets):
            raise self._refusal("data_offsets are not two non-negative integers", shown)
        begin, end = offsets
        needed = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - begin != needed:
            raise self._refusal(f"{dtype} {shape} needs {needed} bytes, the offsets give {end - begin}", shown)
        if data_start + end > self.size:
            raise self._refusal(f"truncated: it ends at byte {data_start + end}, the file has {self.size}", shown)
        return TensorInfo(name, dtype, tuple(shape), data_start + begin, needed)

    def _check_overlap(self, tensors: dict[str, TensorInfo], data_start: int) -> None:
        end = data_start
        for info in sorted(tensors.values(), key=lambda t: (t.offset, t.bytes)):
            if info.offset < end:
                raise self._refusal("its bytes overlap another tensor's", info.name)
            if info.offset > end:
                raise self._refusal(f"{info.offset - end} bytes before it belong to no tensor", info.name)
            end = info.offset + info.bytes
        if end != self.size:
            raise self._refusal(f"{self.size - end} bytes after the last tensor belong to no tensor")
