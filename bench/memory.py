"""What a set of processes takes from the host, and the proof that the experts are in memory once.

Read from /proc: smaps_rollup and smaps (the kernel splits a page among those who map it: PSS; a page that one process
alone maps is private), status (page tables, which smaps leaves out). Not here: starting anything (second_lane).
Invariant: every figure is bytes as the kernel reports them; region pages count once, however many lanes map them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REGION_LABEL = "memfd:expressway-experts"

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S{4} ")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$")


@dataclass(frozen=True, slots=True)
class Pages:
    """Sums over some mappings of one process."""

    size_bytes: int = 0
    rss_bytes: int = 0
    pss_bytes: int = 0
    private_bytes: int = 0
    hugetlb_bytes: int = 0  # 2 MiB pages: in none of the three above


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process: everything it maps, and of that the region."""

    pid: int
    all: Pages
    region: Pages
    page_table_bytes: int

    @property
    def added_bytes(self) -> int:
        """What the host would get back if this process alone ended: its private pages and its page tables.

        Region pages that only this process has touched are not among them: the descriptor keeps those.
        """
        return self.all.private_bytes - self.region.private_bytes + self.page_table_bytes


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """The owner and the lanes of one host at one moment."""

    owner: ProcessMemory
    lanes: tuple[ProcessMemory, ...]

    @property
    def region_bytes(self) -> int:
        """Size of the region's mapping; 0 when nobody maps it."""
        return max((p.region.size_bytes for p in self._all), default=0)

    @property
    def mapping_pss_bytes_sum(self) -> int:
        """The region's touched pages, each counted once over all processes: never above `region_bytes`."""
        small = sum(p.region.pss_bytes for p in self._all)
        return small + max(p.region.hugetlb_bytes for p in self._all)

    @property
    def private_copies_bytes(self) -> int:
        """What all these processes would take if each lane held its own copy of the region's pages that it touched."""
        own = sum(lane.region.rss_bytes + lane.region.hugetlb_bytes for lane in self.lanes)
        return self.total_pss_bytes - self.mapping_pss_bytes_sum + own

    @property
    def last_lane_added_bytes(self) -> int:
        """What the last lane takes on top of all the others."""
        return self.lanes[-1].added_bytes if self.lanes else 0

    @property
    def total_pss_bytes(self) -> int:
        """All pages of all these processes, shared ones once, 2 MiB pages of the region once, page tables included."""
        return sum(p.all.pss_bytes + p.page_table_bytes for p in self._all) + max(
            p.region.hugetlb_bytes for p in self._all
        )

    @property
    def _all(self) -> tuple[ProcessMemory, ...]:
        return (self.owner, *self.lanes)


def region_memory(owner_pid: int, lane_pids: Sequence[int]) -> RegionMemory:
    """Reads the owner and the lanes in their order; raises OSError when one of them is gone or not ours."""
    return RegionMemory(process_memory(owner_pid), tuple(process_memory(pid) for pid in lane_pids))


def process_memory(pid: int) -> ProcessMemory:
    """One process, from its /proc files."""
    folder = Path("/proc") / str(pid)
    status = (folder / "status").read_text()
    tables = re.search(r"^VmPTE:\s+(\d+) kB$", status, re.MULTILINE)
    return ProcessMemory(
        pid,
        pages((folder / "smaps_rollup").read_text().splitlines()),
        pages((folder / "smaps").read_text().splitlines(), REGION_LABEL),
        (int(tables[1]) << 10) if tables else 0,
    )


def pages(lines: Iterable[str], label: str = "") -> Pages:
    """Sums a smaps (or smaps_rollup) text over the mappings whose first line contains `label`."""
    sums: dict[str, int] = {}
    chosen = False
    for line in lines:
        if _MAPPING.match(line):
            chosen = label in line
        elif chosen and (field := _FIELD.match(line)):
            sums[field[1]] = sums.get(field[1], 0) + (int(field[2]) << 10)

    def total(*names: str) -> int:
        return sum(sums.get(name, 0) for name in names)

    return Pages(
        total("Size"),
        total("Rss"),
        total("Pss"),
        total("Private_Clean", "Private_Dirty"),
        total("Shared_Hugetlb", "Private_Hugetlb"),
    )


def host_used_bytes() -> int:
    """Memory of this host that is not available to a new process, all causes together."""
    fields = {
        m[1]: int(m[2]) << 10 for line in Path("/proc/meminfo").read_text().splitlines() if (m := _FIELD.match(line))
    }
    return fields["MemTotal"] - fields["MemAvailable"]
