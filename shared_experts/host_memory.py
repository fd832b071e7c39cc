"""How much memory this host, or this container, still gives: read from /proc, /sys and the control groups.

Not here: allocation.
Invariant: figures are in bytes (or pages where the name says so) and never guessed; what cannot be read counts as "no
further limit" for a control group and as zero for the huge page pool.
"""

from __future__ import annotations

import re
from pathlib import Path

from shared_experts.errors import RegionError

_HUGE_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_FLOOR_MIN_BYTES = 128 << 20
_FLOOR_MAX_BYTES = 1 << 30


def free_huge_pages() -> int:
    """2 MiB pages of the pool that are neither used nor promised."""
    try:
        free = int((_HUGE_POOL / "free_hugepages").read_text())
        promised = int((_HUGE_POOL / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    return max(0, free - promised)


def meminfo(text: str) -> dict[str, int]:
    """`/proc/meminfo` (or smaps_rollup) as {name: bytes}."""
    return {m[1]: int(m[2]) << 10 for m in re.finditer(r"^(\w[\w()]*):\s+(\d+) kB$", text, re.MULTILINE)}


def available_bytes() -> int:
    """Memory that can be taken without swapping, within every control group above this process."""
    available = meminfo(Path("/proc/meminfo").read_text())["MemAvailable"]
    return min([available, *_group_room()])


def floor_bytes() -> int:
    """What a region leaves to the rest of the host: 2 % of its memory, at least 128 MiB and at most 1 GiB."""
    total = meminfo(Path("/proc/meminfo").read_text())["MemTotal"]
    return min(_FLOOR_MAX_BYTES, max(_FLOOR_MIN_BYTES, total // 50))


def require(size_bytes: int) -> None:
    """Raises RegionError unless `size_bytes` can be taken and the floor still stands."""
    available, floor = available_bytes(), floor_bytes()
    if size_bytes > available - floor:
        raise RegionError(
            f"the region needs {size_bytes} bytes and {floor} must stay free, but only {available} bytes are available"
        )


def _own_group() -> Path:
    """The control group (version 2) of this process."""
    try:
        found = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return _CGROUP_ROOT / found[1] if found else _CGROUP_ROOT


def _group_room() -> list[int]:
    """Free bytes of each limited control group above this process; page cache counts as free."""
    room = []
    own = _own_group()
    for group in (own, *own.parents):
        if not group.is_relative_to(_CGROUP_ROOT):
            break
        try:
            limit = int((group / "memory.max").read_text())
            current = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            room.append(max(0, limit - current + int(stat["file"]) - int(stat["shmem"])))
        except (OSError, ValueError, KeyError):
            continue  # "max", or a group without the memory controller
    return room
