"""Logging of a lane: one set-up, JSON lines or a console, always to stderr.

Not here: what is logged. Invariant: prompts and answers are never passed to a logger, only ids, sizes and times;
a log that cannot be written fails nobody.
"""

from __future__ import annotations

import sys
from typing import TextIO, cast

import structlog

from shared_experts.log_lines import LossyLines


def configure_logging(*, json_lines: bool, lane: str) -> None:
    """Call once, first thing in the process."""
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
        wrapper_class=structlog.make_filtering_bound_logger(20),  # INFO
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyLines(sys.stderr))),
    )
    structlog.contextvars.bind_contextvars(lane=lane)
