"""Reads a small file that a pack carries: regular, bounded, never waiting.

Not here: what it means. Invariant: a pipe or device in its place is refused at once; nobody has to write to it first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_pack_file(path: Path, most_bytes: int) -> bytes:
    """Its bytes.

    Raises FileNotFoundError where there is none, and ValueError with the reason for anything but a file in bounds.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > most_bytes:
            raise ValueError(f"over {most_bytes} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(descriptor)
