"""Whether a host's memory holds a region and so many lanes: asked before any process starts.

What surely is taken soon after the start: the region once, and of each lane its process, dense weights and expert cache
(CPU), or the embedding and the conversations that wait, which are pinned at once (GPU). Not here: conversations of CPU
lanes, which take memory as they come (`expressway plan` counts them); limits of a container, which the owner asks about
before it fills the region. Invariant: the rule is pure (`free_here` reads the kernel's files); what
is not known refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import BadOption
from coordinator.host.lane_options import LaneOptions
from coordinator.pack_facts import PackFacts
from coordinator.sizing import PROCESS_BYTES
from coordinator.units import size

HUGE_PAGE_BYTES = 2 << 20
MEMINFO = Path("/proc/meminfo")
FREE_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that can be taken without swapping, which has no reserved huge pages in it."""

    bytes: int | None  # None: cannot be read
    huge_pages: int = 0  # free ones


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of the kernel's text."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def free_here() -> Free:
    """Of this host, now."""
    try:
        available = available_bytes(MEMINFO.read_text())
    except OSError:
        available = None
    try:
        return Free(available, int(FREE_HUGE_PAGES.read_text()))
    except (OSError, ValueError):
        return Free(available)


def lane_bytes(facts: PackFacts, options: LaneOptions) -> Mapping[str, int]:
    """What one lane takes of the host's memory, by what for."""
    if options.device == "cuda":
        parts = {"embedding": facts.embedding_bytes, "conversations that wait": options.state_budget_bytes or 0}
    else:
        cache = min(options.vram_budget_bytes, facts.region_bytes)
        parts = {"dense weights in fp32": facts.dense_fp32_bytes, "expert cache": cache}
    return {"process": PROCESS_BYTES, **parts}


def check_room(facts: PackFacts, options: LaneOptions, lanes: int, free: Free) -> None:
    """BadOption where region and lanes need more than is free."""
    parts = lane_bytes(facts, options)
    lane = sum(parts.values())
    region = 0 if free.huge_pages * HUGE_PAGE_BYTES >= facts.region_bytes else facts.region_bytes
    needed = region + lanes * lane
    if free.bytes is None or needed <= free.bytes:
        return
    fitting = max(0, (free.bytes - region) // lane)
    beside = f" beside the region of {size(region)}" if region else ""
    remedy = f"{fitting} fit" if fitting else "none fits: a smaller --vram-budget, or a host with more memory"
    raise BadOption(
        f"--lanes: {lanes} x {size(lane)} ({_made_of(parts)}){beside} are {size(needed)} of memory, "
        f"and {size(free.bytes)} are free; {remedy}"
    )


def check_one_more(facts: PackFacts, options: LaneOptions, free: Free) -> None:
    """BadOption where one more lane beside those that run needs more than is free."""
    parts = lane_bytes(facts, options)
    lane = sum(parts.values())
    if free.bytes is not None and lane > free.bytes:
        raise BadOption(f"one more lane takes {size(lane)} ({_made_of(parts)}), and {size(free.bytes)} are free")


def _made_of(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(each)}" for name, each in parts.items() if each)
