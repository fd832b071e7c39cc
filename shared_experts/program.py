"""Which version of this program runs, also where it runs from its sources without having been installed."""

from __future__ import annotations

import importlib.metadata

UNINSTALLED = "0+sources"


def version() -> str:
    """The distribution's, or UNINSTALLED."""
    try:
        return importlib.metadata.version("expressway")
    except importlib.metadata.PackageNotFoundError:
        return UNINSTALLED
