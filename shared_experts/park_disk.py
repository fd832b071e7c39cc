"""Parked conversations on disk, so that they survive the owner and the host: one file each, written whole or not.

    magic 8, version u32, fingerprint 32, tenant 16, pages u32, marks u32
    | marks: tokens u32, pages u32, chain 16 | parts: digest 16, size u64 (pages, checkpoints, header)
    | xxh3-128 of everything so far | the parts' bytes, in order

Not here: when one is written or read (park_server). Invariants: a file is written under a temporary name, synced, then
renamed; of a file that is read nothing is believed before its size, its identity and its digests were right; total size
and age are bounded, the oldest go first; files are 0600 in a folder 0700 of this user.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from shared_experts import limits, park_digest
from shared_experts.errors import ParkRefused
from shared_experts.park_index import Mark
from shared_experts.park_memory import Bytes

MAGIC = b"XPWYPARK"
VERSION = 2
SUFFIX = ".park"
_HEAD = struct.Struct("<8sI32s16sII")
_MARK = struct.Struct("<II16s")
_PART = struct.Struct("<16sQ")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation as a file has it; `parts` are (digest, size): pages, a checkpoint for each mark, the header."""

    tenant: bytes
    pages: int
    marks: tuple[Mark, ...]
    parts: tuple[tuple[bytes, int], ...]

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.tenant.hex()}-{self.parts[-1][0].hex()}{SUFFIX}"


class ParkDisk:
    """A folder of parked conversations of one pack."""

    def __init__(
        self, folder: Path, fingerprint: bytes, most_bytes: int, *, most_age_s: float = limits.PARK_DISK_AGE_S
    ) -> None:
        """Makes the folder; raises ParkRefused where it cannot be ours alone."""
        self.folder, self._fingerprint = folder, fingerprint
        self._most_bytes, self._most_age_s = most_bytes, most_age_s
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(folder)
        except OSError as error:
            raise ParkRefused(f"{folder}: cannot hold parked conversations: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ParkRefused(f"{folder}: must be a directory of ours with mode 0700")
        for left in folder.glob(f"*{SUFFIX}.tmp"):  # by an owner that died while it wrote
            left.unlink(missing_ok=True)

    def save(self, saved: Saved, bytes_of: Callable[[int], Bytes]) -> None:
        """Writes a conversation; `bytes_of(part)` gives the bytes of one. Raises OSError or ParkRefused."""
        head = self._head(saved)
        total = len(head) + sum(size for _, size in saved.parts)
        if total > self._most_bytes:
            raise ParkRefused("a conversation larger than what the disk may hold")
        self.prune(total)
        path = self.folder / saved.name
        temporary = self.folder / f"{saved.name}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with open(os.open(temporary, flags, 0o600), "wb", buffering=1 << 20) as file:
                file.write(head)
                for part in range(len(saved.parts)):
                    file.write(bytes_of(part).data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self, saved: Saved) -> None:
        """The conversation is there in a longer form."""
        (self.folder / saved.name).unlink(missing_ok=True)

    def prune(self, room_bytes: int = 0) -> None:
        """Removes what is too old, what is larger than anything written here, and the oldest until `room_bytes` more
        fit. A file with holes, which is none of ours, counts for what it takes: it makes no other one go."""
        now_s, files = time.time(), self._files()
        for path, status in files:
            if now_s - status.st_mtime > self._most_age_s or status.st_size > self._most_bytes:
                path.unlink(missing_ok=True)
        files = self._files()
        held = sum(_taken(status) for _, status in files)
        for path, status in files:
            if held + room_bytes > self._most_bytes:
                path.unlink(missing_ok=True)
                held -= _taken(status)

    def stored_bytes(self) -> int:
        """Of all files."""
        return sum(_taken(status) for _, status in self._files())

    def load(self) -> Iterator[tuple[Saved, Iterator[Bytes]]]:
        """Conversations, the latest first, each with an iterator of its parts' bytes, which raises ParkRefused at a
        damaged one. Files that are no conversation of this pack are skipped; damaged ones are removed."""
        self.prune()
        for path, _ in reversed(self._files()):
            try:
                with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                    saved = self._parse(file.fileno(), file.read)
                    yield saved, _parts(saved, file.read)
            except _Foreign:
                continue
            except (OSError, ParkRefused):
                path.unlink(missing_ok=True)

    def _head(self, saved: Saved) -> bytes:
        head = _HEAD.pack(MAGIC, VERSION, self._fingerprint, saved.tenant, saved.pages, len(saved.marks))
        head += b"".join(_MARK.pack(mark.tokens, mark.pages, mark.chain) for mark in saved.marks)
        head += b"".join(_PART.pack(*part) for part in saved.parts)
        return head + xxhash.xxh3_128_digest(head)

    def _parse(self, fd: int, read: Callable[[int], bytes]) -> Saved:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _Foreign
        head = read(_HEAD.size)
        if len(head) != _HEAD.size:
            raise ParkRefused("a file that is too short")
        magic, version, fingerprint, tenant, pages, marks = _HEAD.unpack(head)
        if (magic, version, fingerprint) != (MAGIC, VERSION, self._fingerprint):
            raise _Foreign
        if marks > limits.PARK_MARKS or pages + marks + 1 > limits.PARK_BLOBS:
            raise ParkRefused("more parts than a conversation has")
        count = pages + marks + 1
        table = read(_MARK.size * marks + _PART.size * count + _DIGEST_BYTES)
        if len(table) != _MARK.size * marks + _PART.size * count + _DIGEST_BYTES:
            raise ParkRefused("a file that is too short")
        if xxhash.xxh3_128_digest(head + table[:-_DIGEST_BYTES]) != table[-_DIGEST_BYTES:]:
            raise ParkRefused("a damaged file")
        places = [_MARK.unpack_from(table, _MARK.size * at) for at in range(marks)]
        parts = [_PART.unpack_from(table, _MARK.size * marks + _PART.size * at) for at in range(count)]
        if status.st_size != len(head) + len(table) + sum(size for _, size in parts):
            raise ParkRefused("a file of another size")
        found = tuple(Mark(tokens, chain, needed) for tokens, needed, chain in places)
        return Saved(tenant, pages, found, tuple(parts))

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """Oldest first. What is no plain file is nobody's conversation: to open or remove it could wait or fail."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append((path, status))
        return sorted(found, key=lambda each: (each[1].st_mtime, each[0].name))


class _Foreign(Exception):
    """Not a conversation of this pack."""


def _taken(status: os.stat_result) -> int:
    """Bytes of a file on the disk; at most its size, which a hole makes larger."""
    return min(status.st_size, 512 * status.st_blocks)


def _parts(saved: Saved, read: Callable[[int], bytes]) -> Iterator[Bytes]:
    for digest, size in saved.parts:
        data = np.frombuffer(read(size), np.uint8)
        if data.shape[0] != size or park_digest.of_bytes(data) != digest:
            raise ParkRefused("a damaged part")
        yield data


def longer_form(shorter: Saved, longer: Saved) -> bool:
    """Whether the second is the first conversation, gone on: all of its whole pages, and more tokens."""
    whole = [digest for digest, _ in shorter.parts[: shorter.pages]][:-1]
    same: Sequence[bytes] = [digest for digest, _ in longer.parts[: len(whole)]]
    ends = [saved.marks[-1].tokens if saved.marks else 0 for saved in (shorter, longer)]
    return bool(whole) and shorter.tenant == longer.tenant and list(same) == whole and ends[0] < ends[1]
