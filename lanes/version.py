"""`python -m lanes --version`: one JSON line about this installation, without a pack and without starting anything.

Invariant: always one object and exit code 0; what is missing is said in it, with the reason.
"""

from __future__ import annotations

import importlib.metadata
import json

from lanes.errors import NativeKernelUnavailable


def report() -> str:
    """Versions, and the instruction set that the native kernel would use here (or why it cannot)."""
    from lanes.experts.native import ExpertKernel

    found = {name: importlib.metadata.version(name) for name in ("expressway", "torch", "numpy")}
    try:
        kernel = {"isa": ExpertKernel.best_isa()}
    except NativeKernelUnavailable as error:
        kernel = {"error": str(error)}
    return json.dumps({"versions": found, "kernel": kernel})
