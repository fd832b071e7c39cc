"""The memory accounting: sums by label, region pages once, and the same answers from real processes."""

import mmap
import os
import subprocess
import sys

from bench.memory import Pages, ProcessMemory, RegionMemory, pages, process_memory, region_memory
from tests.fakes import regions

MIB = 1 << 20
SMAPS = """\
7f0000000000-7f0000100000 r--s 00000000 00:01 1  /memfd:expressway-experts (deleted)
Size:               1024 kB
Rss:                 512 kB
Pss:                 256 kB
Shared_Clean:        500 kB
Private_Clean:         8 kB
Private_Dirty:         4 kB
VmFlags: rd sh mr
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
Pss:                4096 kB
Private_Dirty:      4096 kB
7f0000400000-7f0000600000 r--s 00000000 00:01 2  /memfd:expressway-experts (deleted)
Size:               2048 kB
Rss:                   0 kB
Pss:                   0 kB
Shared_Hugetlb:     2048 kB
"""


def test_only_labelled_mappings_are_summed():
    kib = 1024
    assert pages(SMAPS.splitlines(), "memfd:expressway-experts") == Pages(
        3072 * kib, 512 * kib, 256 * kib, 12 * kib, 2048 * kib
    )
    assert pages(SMAPS.splitlines()) == Pages(7168 * kib, 4608 * kib, 4352 * kib, 4108 * kib, 2048 * kib)
    assert pages([]) == Pages()


def test_the_region_counts_once_and_a_lane_adds_only_its_own():
    def process(pid, private, region_private, pss, hugetlb=0):
        region = Pages(100 * MIB, 60 * MIB, pss, region_private, hugetlb)
        return ProcessMemory(pid, Pages(0, 0, pss + private, private + region_private, hugetlb), region, MIB)

    owner = ProcessMemory(1, Pages(pss_bytes=5 * MIB), Pages(), 0)
    two = RegionMemory(owner, (process(2, 20 * MIB, 10 * MIB, 35 * MIB), process(3, 30 * MIB, 0, 25 * MIB)))
    assert two.region_bytes == 100 * MIB
    assert two.mapping_pss_bytes_sum == 60 * MIB
    assert two.last_lane_added_bytes == 31 * MIB
    assert two.total_pss_bytes == (5 + 20 + 35 + 1 + 30 + 25 + 1) * MIB
    huge = RegionMemory(owner, (process(2, 0, 0, 0, 100 * MIB), process(3, 0, 0, 0, 100 * MIB)))
    assert huge.mapping_pss_bytes_sum == 100 * MIB
    assert RegionMemory(owner, ()).region_bytes == RegionMemory(owner, ()).last_lane_added_bytes == 0


TOUCH = """
import mmap, sys
view = mmap.mmap(int(sys.argv[1]), 0, mmap.MAP_SHARED, mmap.PROT_READ)
total = sum(view[i] for i in range(0, len(view), 4096))
print(total, flush=True)
sys.stdin.read()
"""


def test_two_real_processes_share_one_region(tmp_path):
    region = regions.build(tmp_path)
    size = os.fstat(region.fd).st_size
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOUCH, str(region.fd)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[region.fd],
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            process.stdout.readline()
        found = region_memory(os.getpid(), [p.pid for p in processes])
        assert found.region_bytes == size
        assert found.mapping_pss_bytes_sum == size
        assert [p.region.pss_bytes for p in found.lanes] == [size // 2] * 2
        assert found.owner.region == Pages()
        assert 0 < found.last_lane_added_bytes < found.lanes[1].all.rss_bytes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    with mmap.mmap(region.fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert sum(view[i] for i in range(0, size, 4096)) >= 0
        alone = process_memory(os.getpid())
        assert alone.region.private_bytes == alone.region.pss_bytes == size
    os.close(region.fd)
