"""Reads a small file that a pack carries: regular, bounded, never waiting, and as the manifest has it.

Not here: what it means, what a manifest looks like (pack_facts asks). Invariants: a pipe or device in its place is
refused at once; nobody has to write to it first. With digests, bytes that the pack was not made with are never used.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from coordinator.errors import BadPack

MANIFEST = "manifest.msgpack"

Digests = Mapping[str, str]  # SHA-256 in hexadecimal, by the name of the file


def read_pack_file(path: Path, most_bytes: int, digests: Digests | None = None) -> bytes:
    """Its bytes. `digests`: of all files that the pack has; None for a folder that is no pack.

    Raises FileNotFoundError where there is none, ValueError with the reason for anything but a file in bounds, and
    BadPack when it is not the file that the pack was made with.
    """
    if digests is not None and path.name not in digests:
        raise FileNotFoundError(f"{path}: not of the pack")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > most_bytes:
            raise ValueError(f"over {most_bytes} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(found.st_size)
    finally:
        os.close(descriptor)
    if digests is not None and hashlib.sha256(data).hexdigest() != digests[path.name]:
        raise BadPack(f"{path}: not the file that the pack was made with; `expressway verify` shows what is damaged")
    return data
