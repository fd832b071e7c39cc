"""Files of tokens: little-endian 16-bit ids, every document ended by <|endoftext|>, compressed with LZMA.

Not here: what the ids mean. Invariant: `read` gives back what `write` was given.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np

TRAIN = "train"
HELD_OUT = ("code", "prose", "chat")  # kinds of documents
SUFFIX = ".u16.xz"
# Two-byte items: position and literal contexts count in pairs of bytes.
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27, "lc": 3, "lp": 1, "pb": 1}
]


def write(path: Path, parts: Iterable[np.ndarray]) -> int:
    """Writes parts of ids one after another; returns how many ids."""
    count = 0
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=_FILTERS) as file:
        for part in parts:
            if part.size and (part.min() < 0 or part.max() > 0xFFFF):
                raise ValueError("an id does not fit 16 bits")
            file.write(np.ascontiguousarray(part).astype("<u2").tobytes())
            count += part.size
    return count


def read(path: Path) -> np.ndarray:
    """All ids of a file, uint16."""
    with lzma.open(path, "rb") as file:
        return np.frombuffer(file.read(), "<u2")
