"""The frame of a result file: what was run, with which versions, on what host, with which pack, under what conditions.

Not here: any measurement. Invariant: every result file of `bench/results` that uses this has the five keys that make a
figure worth keeping; paths of this machine do not appear in it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path


def frame(
    module: str, arguments: Sequence[str] | None, *, pack: Mapping[str, object], conditions: Mapping[str, object],
    packages: tuple[str, ...] = (),
) -> dict[str, object]:  # fmt: skip
    """The five keys; `packages` are distributions whose versions matter to the figure, `arguments` None those of this
    process. Of an absolute path its last part is told."""
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": " ".join(["python -m", module, *(Path(a).name if a.startswith("/") else a for a in words)]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "host": host(),
        "pack": dict(pack),
        "conditions": {**conditions, "load_average": [round(x, 2) for x in os.getloadavg()]},
    }


def host() -> dict[str, object]:
    """CPU, memory and kernel of this machine."""
    memory = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
    }


def write(result: Mapping[str, object], out: Path | None) -> None:
    """Prints the result as JSON and, when `out` is given, also writes it there."""
    text = json.dumps(result, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    sys.stdout.write(text + "\n")
