"""Logging of a process: one set-up, JSON lines or a console, always to stderr.

Not here: what is logged. Invariant: prompts and answers are never passed to a logger, only ids, sizes and times.
"""

from __future__ import annotations

import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(process_name=process)
