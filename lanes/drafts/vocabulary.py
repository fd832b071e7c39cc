"""A draft vocabulary: the ids that the draft layer may name, so that its head reads a part of the rows.

A token outside is drafted never and answered as ever. `expressway draft-vocab` makes the file from a text.
Not here: which ids (the tool), the head (models). Invariant: ids are distinct, ascending, and in the vocabulary.

    {"draft_vocabulary": 1, "ids": [0, 3, 4, …]}
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from lanes import limits
from lanes.errors import StartError


def read(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of a file; raises StartError, whose message names the file."""
    try:
        value = json.loads(_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error) or "not JSON"
        raise StartError(f"--draft-vocab: {path}: {reason}") from None
    ids = value.get("ids") if isinstance(value, dict) and value.get("draft_vocabulary") == 1 else None
    if not isinstance(ids, list) or not ids:
        raise StartError(f"--draft-vocab: {path}: not a draft vocabulary; `expressway draft-vocab` makes one")
    if not all(type(each) is int for each in ids) or ids != sorted(set(ids)):
        raise StartError(f"--draft-vocab: {path}: ids must be whole numbers, ascending, each once")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise StartError(f"--draft-vocab: {path}: an id is not in the model's vocabulary of {vocab_size}")
    return tuple(ids)


def _bytes(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place is refused, not read
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if found.st_size > limits.DRAFT_VOCABULARY_BYTES:
            raise ValueError(f"over {limits.DRAFT_VOCABULARY_BYTES} bytes")
        return file.read(found.st_size)
