"""`python -m lanes --version`: one JSON line about this installation, without a pack and without starting anything.

Invariant: always one object and exit code 0; what is missing is said in it, with the reason.
"""

from __future__ import annotations

import importlib.metadata
import json

from lanes.errors import NativeKernelUnavailable
from shared_experts.errors import NativeMissing
from shared_experts.program import version


def report() -> str:
    """Versions, the native kernel's instruction set here (or why it has none), what is wrong with other libraries."""
    from lanes.experts.native import ExpertKernel
    from shared_experts.floats import load_floats
    from shared_experts.quantiser import load_quantiser
    from shared_experts.row_reader import check_library

    found = {"expressway": version(), **{name: importlib.metadata.version(name) for name in ("torch", "numpy")}}
    try:
        kernel = {"isa": ExpertKernel.best_isa()}
    except NativeKernelUnavailable as error:
        kernel = {"error": str(error)}
    missing = []
    for load in (load_floats, load_quantiser, check_library):
        try:
            load()
        except NativeMissing as error:
            missing.append(str(error))
    return json.dumps({"versions": found, "kernel": kernel, "missing": missing})
