"""What one shared region saves against a copy per lane, for 2 and 4 lanes of one pack, each having read every expert.

The baseline is counted, not run: the same processes, with the region's pages that a lane touched as its own. Not here:
how memory is read (memory), what the second lane alone adds (second_lane). Invariant: nothing started here outlives it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc

from bench.client import ask_now
from bench.cluster import Cluster
from bench.memory import region_memory
from bench.result import frame, write
from bench.startup import CLI, DOORS, make_pack

LANES = (2, 4)
WORDS = 400  # of a prompt: enough that every expert of a small model is read


def measure(pack: Path, lanes: int) -> dict[str, object]:
    """Bytes of a cluster of so many lanes."""
    with Cluster(pack, ("--lanes", str(lanes), *DOORS, "--cluster", "saving", "--vram-budget", "0"), quiet=True) as up:
        pids = [up.pids[f"lane-{k}"] for k in range(lanes)]
        with grpc.insecure_channel(up.grpc) as channel:
            for number in range(2 * lanes):  # idle lanes take turns
                ask_now(channel, " ".join(f"word{(k * 7 + number) % 97}" for k in range(WORDS)), max_tokens=1)
        memory = region_memory(up.pids["owner"], pids)
    shared, private = memory.total_pss_bytes, memory.private_copies_bytes
    return {
        "lanes": lanes,
        "region_bytes": memory.region_bytes,
        "touched_by_each_lane": [p.region.rss_bytes + p.region.hugetlb_bytes for p in memory.lanes],
        "region_bytes_in_memory": memory.mapping_pss_bytes_sum,
        "all_processes_bytes": shared,
        "with_private_copies_bytes": private,
        "saved_bytes": private - shared,
        "saved_share": round((private - shared) / private, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m bench.saving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="exw-") as name:
        pack, _ = make_pack(Path(name), "demo")
        inspected = subprocess.run([*CLI, "inspect", "--json", str(pack)], check=True, capture_output=True)
        experts = json.loads(inspected.stdout)["experts"]
        found = [measure(pack, lanes) for lanes in LANES]
    conditions = {"expert_cache": "none", "definition": "sum of PSS and page tables of owner and lanes"}
    result = frame("bench.saving", [], pack={**experts, "values": "random"}, conditions=conditions, packages=("torch",))
    write({**result, "clusters": found}, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
