"""Doctor's look at memory, limits and disks: does a region fit, can it be locked, is there room for state.

Every check takes the text of the kernel's file, so that a test can play any host. Not here: reading the files
(doctor_checks). Invariant: as there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.cli.doctor_checks import Check
from coordinator.host.room import HUGE_PAGE_BYTES, available_bytes
from coordinator.sizing import PROCESS_BYTES
from coordinator.units import size

GIB = 1 << 30
LOW_MEMORY_BYTES = 4 * GIB
SMALL_MEMLOCK_BYTES = 1 * GIB
FEW_FILES = 1024
LOW_DISK_BYTES = 1 * GIB


def memory(meminfo: str) -> Check:
    """The region takes the size of a pack's experts.bin; each CPU lane its cache and dense weights."""
    available = available_bytes(meminfo)
    if available is None:
        return Check("memory", "warn", "cannot be read")
    text = f"{size(available)} available"
    if available < LOW_MEMORY_BYTES:
        return Check("memory", "warn", text, "the experts of a pack must fit: `expressway doctor PACK` compares")
    return Check("memory", "ok", text)


def pack_fits(described: Mapping[str, Any], meminfo: str, free_huge_pages: int, lanes: int, cache_bytes: int) -> Check:
    """Region and lanes of this pack against what is free; `described` is what `inspect --json` says."""
    name = "pack in memory"
    region = int(described["experts"]["bytes"])
    dense = sum(int(section["bytes"]) for section in described["sections"] if section["name"] == "dense")
    lane = dense * (2 if described["dense_dtype"] == "bf16" else 1) + min(cache_bytes, region) + PROCESS_BYTES
    in_pool = free_huge_pages * HUGE_PAGE_BYTES >= region
    needed = lanes * lane + (0 if in_pool else region)
    available = available_bytes(meminfo)
    if available is None:
        return Check(name, "warn", "free memory cannot be read")
    where = " (in reserved huge pages)" if in_pool else ""
    text = (
        f"region {size(region)}{where} and {lanes} x {size(lane)} for CPU lanes, "
        f"{size(available)} available; conversations come on top"
    )
    if needed > available:
        return Check(name, "fail", text, "fewer --lanes, a smaller --vram-budget, or `expressway pack --experts q4g64`")
    if needed > 0.9 * available:
        return Check(name, "warn", text, "little is left for conversations: fewer --lanes or a smaller --context")
    return Check(name, "ok", text)


def memlock(limits: str) -> Check:
    """Pinned memory on GPU lanes counts against it."""
    limit = soft_limit(limits, "Max locked memory")
    if limit == "unlimited":
        return Check("locked memory", "ok", "no limit")
    if limit is None:
        return Check("locked memory", "warn", "the limit cannot be read")
    text = f"at most {int(limit) >> 20} MiB"
    if int(limit) < SMALL_MEMLOCK_BYTES:
        remedy = "GPU lanes pin the region: ulimit -l unlimited (CPU lanes do not care)"
        return Check("locked memory", "warn", text, remedy)
    return Check("locked memory", "ok", text)


def open_files(limits: str) -> Check:
    """Every connection is a file."""
    limit = soft_limit(limits, "Max open files")
    if limit is None:
        return Check("open files", "warn", "the limit cannot be read")
    if limit != "unlimited" and int(limit) < FEW_FILES:
        return Check("open files", "warn", f"at most {limit}", f"ulimit -n {FEW_FILES} or more")
    return Check("open files", "ok", f"at most {limit}")


def soft_limit(limits: str, name: str) -> str | None:
    """One soft limit of /proc/self/limits: digits or "unlimited"."""
    match = re.search(rf"^{name}\s+(\d+|unlimited)\s", limits, re.MULTILINE)
    return match[1] if match else None


def huge_pages(free: str | None) -> Check:
    """2 MiB pages make the region's pages cheaper; without them 4 KiB pages serve."""
    if free is None or not free.strip().isdigit():
        return Check("huge pages", "ok", "none on this kernel; 4 KiB pages serve")
    if int(free) == 0:
        return Check("huge pages", "ok", "none reserved; 4 KiB pages serve (vm.nr_hugepages reserves some)")
    return Check("huge pages", "ok", f"{int(free)} free of 2 MiB, {size(int(free) * HUGE_PAGE_BYTES)}")


def transparent_huge_pages(shared: str | None) -> Check:
    """For shared memory: what a region without reserved pages may get."""
    name = "transparent huge pages"
    match = re.search(r"\[(\w+)\]", shared or "")
    if match is None:
        return Check(name, "ok", "not on this kernel")
    if match[1] in ("never", "deny"):
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled gives lanes fewer page-table misses"
        return Check(name, "ok", f"off for shared memory ({remedy})")
    return Check(name, "ok", f"{match[1]} for shared memory")


def state_disk(state: Path) -> Check:
    """Logs and profiles are kept there."""
    root = next(parent for parent in (state, *state.parents) if parent.exists())
    try:
        free = shutil.disk_usage(root).free
    except OSError as error:
        return Check("state directory", "fail", f"{state}: {error.strerror}", "set XDG_STATE_HOME")
    text = f"{state}: {size(free)} free"
    if free < LOW_DISK_BYTES:
        return Check("state directory", "warn", text, "free some space, or set XDG_STATE_HOME to another disk")
    return Check("state directory", "ok", text)
