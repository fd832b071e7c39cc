"""Logging of a process: one set-up, JSON lines or a console, always to stderr.

Not here: what is logged. Invariant: prompts and answers are never passed to a logger, only ids, sizes and times;
a log that cannot be written fails nobody.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO, cast

import structlog


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


def configure_logging(*, json_lines: bool, process: str, level: str = "info") -> None:
    """Call once, first thing in a process."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if json_lines else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyLines(sys.stderr))),
    )
    structlog.contextvars.bind_contextvars(process_name=process)
