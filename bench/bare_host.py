"""Benches on a GPU host that has little but torch, for so many minutes: imported before anything that logs.

Where structlog is missing, whoever logs gets a logger that says nothing. Not here: a lane's process, which needs it.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import sys
from types import ModuleType


class _Silent:
    def __getattr__(self, name: str) -> object:
        return lambda *words, **values: None


if importlib.util.find_spec("structlog") is None:
    sys.modules["structlog"] = ModuleType("structlog")
    sys.modules["structlog"].get_logger = lambda *names: _Silent()  # type: ignore[attr-defined]


def stop_after(limit_s: float) -> None:
    """Ends the process that late, after saying where every thread stood; what was written and printed stays."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
