"""The cores this process may use, in the order in which they are dealt out: near ones beside each other.

Read from /sys. Not here: who gets which (coordinator.cores). Invariant: every allowed core, once; where the kernel does
not say how they lie, by their numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def allowed_cores(folder: Path = CPUS) -> list[int]:
    """By socket, then the threads of one core beside each other: what computes is theirs together."""
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place(folder, core), core))


def _place(folder: Path, core: int) -> tuple[int, int]:
    """Its socket, and the first thread of its core."""
    own = folder / f"cpu{core}" / "topology"
    try:
        socket = int((own / "physical_package_id").read_text())
        siblings = (own / "thread_siblings_list").read_text().strip()
        return socket, int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return 0, core
