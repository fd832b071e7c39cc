"""Log lines that may be lost. Not here: what is logged and how it looks (cli_own, lanes.logs)."""

from __future__ import annotations

import contextlib
from typing import TextIO


class LossyLines:
    """A file for log lines: one that cannot be written (disk full, reader gone) is lost, and nobody fails for it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """All of it, or what could be."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As far as that goes."""
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()
