"""How long a lane takes to attach, by size of the region: ask, check seals and header, map.

The regions have a true header and no written record (attaching must not touch one, so what they hold cannot matter); a
child process lends them, as an owner does. Not here: filling a region (the owner logs that) and pinning for a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.result import frame, write
from shared_experts.attach import attach
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.handoff import RegionStatus
from shared_experts.layout import Q4G64, RecordLayout
from shared_experts.manifest import ExpertsInfo, Manifest, Section
from shared_experts.memfd import REQUIRED_SEALS
from shared_experts.region import READY_WORD, RegionHeader, RegionShape

HIDDEN, INTERMEDIATE = 2560, 640
GENERATION = bytes(range(16))


def manifest(size_mib: int) -> Manifest:
    """One layer of as many true-shaped experts as fit."""
    record = RecordLayout.of(Q4G64, HIDDEN, INTERMEDIATE).record_bytes
    experts = (size_mib << 20) // record
    info = ExpertsInfo(Q4G64.name, HIDDEN, INTERMEDIATE, 1, 0, experts, record)
    section = Section("experts.0", "experts.bin", 0, experts * record, bytes(32))
    return Manifest("sparse", "qwen4_exp", {}, info, "bf16", (), (section,), bytes(32), "bench")


def lend(path: Path, size_mib: int) -> None:
    """The child: a sealed region of this size, lent until stdin ends."""
    shape = RegionShape.of(manifest(size_mib))
    writer = os.memfd_create("expressway-experts", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.pwrite(writer, RegionHeader.of(shape, GENERATION, os.getpid()).encode() + READY_WORD, 0)
    os.ftruncate(writer, shape.total_bytes)
    fcntl.fcntl(writer, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
    fd = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
    total = shape.total_bytes
    status = RegionStatus("ready", "built", total, total, shape.fingerprint, GENERATION, os.getpid())
    with DescriptorServer(path, lambda: (status, fd)):
        sys.stdin.read()


def measure(size_mib: int, rounds: int) -> dict[str, object]:
    """Attach times against a lending child process."""
    expected = manifest(size_mib)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "owner.sock"
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.attach", "--lend", str(path), "--sizes-mib", str(size_mib)],
            stdin=subprocess.PIPE,
        )
        try:
            attach(path, expected, 30.0).close()
            times_s = []
            for _ in range(rounds):
                began_s = time.perf_counter()
                region = attach(path, expected, 30.0)
                times_s.append(time.perf_counter() - began_s)
                region.close()
        finally:
            child.communicate()
    return {
        "region_bytes": RegionShape.of(expected).total_bytes,
        "attach_median_ms": round(1e3 * statistics.median(times_s), 3),
        "attach_max_ms": round(1e3 * max(times_s), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every size and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.attach", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes-mib", default="64,1024,4096")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--lend", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    sizes = [int(size) for size in options.sizes_mib.split(",")]
    if options.lend:
        lend(options.lend, sizes[0])
        return 0
    tables = [measure(size, options.rounds) for size in sizes]
    result = frame(
        "bench.attach",
        list(argv if argv is not None else sys.argv[1:]),
        pack={"format": Q4G64.name, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "layers": 1, "values": "holes"},
        conditions={"rounds": options.rounds, "region_pages": "4 KiB, shared memfd", "peer": "another process"},
    )
    write({**result, "tables": tables}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
