"""A file of token ids, as `deploy.demo_model.data` writes held-out text: little-endian uint16, .xz or plain."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np


def read_token_file(path: Path) -> np.ndarray:
    """All ids, int64 [N]."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return np.frombuffer(raw, "<u2").astype(np.int64)
