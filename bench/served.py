"""What a cluster that runs on this host takes and how it came up, and how its lanes read prompts beside each other.

    python -m bench.served RUN_DIR --logs STATE_DIR/log --walk true --read 15360 --restart lane-1

Memory is that of owner, lanes and, where another process holds the region, its holder (--holder PID): region pages
once, and what the last lane adds. Start-up is the ready time and each process's log, in seconds from the first line of
all. Prompts go to the lanes' own sockets, so nobody else may be asking. Not here: load (`bench run`), starting
clusters (bench.startup).
Invariant: what fails is told by its part's name, and the other parts are written all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from bench.load.walked import walk_of
from bench.memory import ProcessMemory, RegionMemory, process_memory
from bench.result import frame, write
from bench.startup import await_back, lane_of
from bench.synthetic.shape import SHAPES
from bench.two_lanes import readings
from laneproto.v1 import serve_pb2_grpc

Figures = dict[str, Any]
LINES_MOST = 200  # of a log


def lanes_of(cluster: Figures) -> dict[str, int]:
    """Process ids by name, in the lanes' order."""
    pids = {name: int(pid) for name, pid in cluster["pids"].items() if name.startswith("lane-")}
    return dict(sorted(pids.items(), key=lambda each: int(each[0].removeprefix("lane-"))))


def memory(cluster: Figures, holder: int | None) -> Figures:
    """Of owner and lanes, and of the holder."""
    lanes = lanes_of(cluster)
    found = RegionMemory(process_memory(int(cluster["pids"]["owner"])), tuple(map(process_memory, lanes.values())))
    others = [process_memory(holder)] if holder is not None else []
    region_pss_bytes = found.mapping_pss_bytes_sum + sum(each.region.pss_bytes for each in others)
    last = found.lanes[-1]
    return {
        "region_bytes": found.region_bytes, "region_pss_bytes_over_all_processes": region_pss_bytes,
        "region_pages_once": region_pss_bytes <= found.region_bytes,
        "total_pss_bytes": found.total_pss_bytes + sum(each.all.pss_bytes + each.page_table_bytes for each in others),
        "with_private_copies_bytes": found.private_copies_bytes,
        "last_lane_added_bytes": last.added_bytes,
        "last_lane_added_of_the_region": round(last.added_bytes / max(1, found.region_bytes), 4),
        "processes": {
            name: _told(each)
            for name, each in zip(
                ("owner", *lanes, "holder"), (found.owner, *found.lanes, *others), strict=False
            )
        },
    }  # fmt: skip


def _told(process: ProcessMemory) -> Figures:
    return {
        "pss_bytes": process.all.pss_bytes, "private_bytes": process.all.private_bytes,
        "region_pss_bytes": process.region.pss_bytes, "page_table_bytes": process.page_table_bytes,
    }  # fmt: skip


def startup(cluster: Figures, logs: Path | None) -> Figures:
    """When it was ready, and what its processes logged on the way: (seconds, event, seconds it says it took)."""
    events: list[tuple[float, str, str, object]] = []
    for file in sorted(logs.glob("*.log")) if logs else ():
        for line in file.read_text(errors="replace").splitlines()[:LINES_MOST]:
            try:
                said = json.loads(line)
                at_s = datetime.fromisoformat(said["timestamp"]).timestamp()
                events.append((at_s, file.stem, str(said["event"]), said.get("seconds")))
            except (ValueError, KeyError, TypeError):
                continue
    first_s = min((at_s for at_s, *_ in events), default=0.0)
    by_process: dict[str, list[list[object]]] = {}
    for at_s, process, event, seconds in sorted(events, key=lambda each: each[0]):
        by_process.setdefault(process, []).append([round(at_s - first_s, 2), event, seconds])
    return {"ready_s": cluster["ready_s"], "cores": cluster.get("cores"), "logs": by_process}


def prompts(cluster: Figures, scale: str, tokens: int, repeats: int) -> Figures:
    """Of the first two lanes."""
    sockets = [Path(cluster["run_dir"]) / f"{name}.sock" for name in list(lanes_of(cluster))[:2]]
    with ThreadPoolExecutor(2) as pool:
        return readings(walk_of(scale), sockets, tokens, pool, repeats)


def restart(cluster: Figures, lane: str) -> Figures:
    """SIGKILLs it; seconds until the door says that it is ready again."""
    with grpc.insecure_channel(cluster["grpc"]) as channel:
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        before = lane_of(stub, lane)
        began_s = time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        return {"lane": lane, "ready_again_s": round(await_back(stub, before, began_s), 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.served", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="of the cluster: there is its cluster.json")
    add("--logs", type=Path, metavar="DIR", help="its logs, in JSON lines (`serve --log-json`)")
    add("--holder", type=int, metavar="PID", help="who holds the region beside the owner")
    add("--walk", choices=tuple(SHAPES), help="the synthetic model that is served; for --read")
    add("--read", type=int, default=0, metavar="TOKENS", help="also read prompts of this length, alone and beside")
    add("--repeats", type=int, default=1, help="of prompts alone and beside (default: 1)")
    add("--restart", metavar="LANE", help="at last, kill this lane and wait until it is back")
    add("--out", type=Path, help="also write the object to this file, after every part")
    chosen = parser.parse_args(argv)
    if chosen.read and not chosen.walk:
        parser.error("--read: needs --walk")
    cluster = json.loads((chosen.run_dir / "cluster.json").read_text())
    parts: dict[str, Callable[[], Figures]] = {
        "startup": lambda: startup(cluster, chosen.logs), "memory": lambda: memory(cluster, chosen.holder)
    }  # fmt: skip
    if chosen.read:
        parts["prompts"] = lambda: prompts(cluster, chosen.walk, chosen.read, chosen.repeats)
    if chosen.restart:
        parts["restart"] = lambda: restart(cluster, chosen.restart)
    result: Figures = frame(
        "bench.served", argv, pack={"name": cluster["model"]},
        conditions={"lanes": len(lanes_of(cluster))}, packages=("torch", "grpcio", "expressway"),
    )  # fmt: skip
    failed: dict[str, str] = {}
    for name, part in parts.items():
        try:
            result[name] = part()
        except (OSError, RuntimeError, ValueError, KeyError, StopIteration, grpc.RpcError) as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
        if chosen.out is not None:
            chosen.out.write_text(json.dumps({**result, "failed": failed}, indent=1) + "\n")
    write({**result, "failed": failed}, chosen.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
