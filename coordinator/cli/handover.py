"""Hands the terminal over to another package's command line: this process becomes it, with its output and exit code.

Invariant: the coordinator's process never imports what the other package imports (torch, numpy).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from coordinator.launchers.base import module_argv


def become(module: str, *arguments: str) -> NoReturn:
    """Replace this process by `python -m MODULE ARGUMENTS…`."""
    sys.stdout.flush()
    sys.stderr.flush()
    argv = module_argv(module, *arguments)
    os.execv(argv[0], argv)  # noqa: S606  a fixed argument list, no shell
