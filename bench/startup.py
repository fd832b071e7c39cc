"""How long a start takes: checkpoint to pack, pack to ready lanes, the same with a region that another cluster holds,
and one lane that died.

Drives real processes as a user would: `expressway serve`, SIGKILL to a lane, the public gRPC door. Not here: what each
step of a start costs inside (logs). Invariant: nothing started here outlives it; every figure is a median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from bench.checkpoint import PRESETS, write_checkpoint
from bench.client import ask_now
from bench.cluster import Cluster
from bench.result import frame, write
from laneproto.v1 import serve_pb2, serve_pb2_grpc

CLI = (sys.executable, "-m", "coordinator.cli")
LIMIT_S = 300.0
POLL_S = 0.02
DOORS = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--page", "off")


class NotBack(RuntimeError):
    """The lane was not ready again in time."""


def make_pack(folder: Path, preset: str) -> tuple[Path, float]:
    """A pack of random weights, and the seconds of its conversion."""
    write_checkpoint(folder / "checkpoint", PRESETS[preset])
    began_s = time.monotonic()
    group = "q4g64" if PRESETS[preset].moe_intermediate_size % 64 == 0 else "q4g32"
    command = [*CLI, "pack", str(folder / "checkpoint"), str(folder / "pack"), "--experts", group]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "pack", time.monotonic() - began_s


def restart_s(cluster: Cluster, lane: str) -> dict[str, float]:
    """SIGKILLs the lane; seconds until the door says it is ready again, and until a first answer came from anywhere."""
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        before = lane_of(stub, lane)
        began_s = time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        ask_now(channel, "Hello", max_tokens=1)
        other_s = time.monotonic() - began_s
        return {"ready_s": await_back(stub, before, began_s), "other_lane_answers_s": other_s}


def lane_of(stub: serve_pb2_grpc.ExpresswayStub, lane: str) -> serve_pb2.LaneInfo:
    """What the door says of it."""
    lanes = stub.ListLanes(serve_pb2.ListLanesRequest(), timeout=LIMIT_S).lanes
    found: serve_pb2.LaneInfo = next(each for each in lanes if each.lane == lane)
    return found


def await_back(stub: serve_pb2_grpc.ExpresswayStub, before: serve_pb2.LaneInfo, began_s: float) -> float:
    """Seconds from then until the door says that the lane is ready again; raises NotBack."""
    while True:
        now = lane_of(stub, before.lane)
        if now.restarts > before.restarts and now.state in ("ready", "busy"):
            return time.monotonic() - began_s
        if time.monotonic() - began_s > LIMIT_S:
            raise NotBack(f"{before.lane} is {now.state} {LIMIT_S:g} s after its end")
        time.sleep(POLL_S)


def measure(pack: Path, lanes: int, rounds: int) -> dict[str, object]:
    """Medians of every step."""
    cold, held, back, other = [], [], [], []
    options = ("--lanes", str(lanes), *DOORS)
    for number in range(rounds):
        with Cluster(pack, (*options, "--cluster", "startup-a"), quiet=True) as first:
            cold.append(first.ready_s)
            with Cluster(pack, (*options, "--cluster", "startup-b"), quiet=True) as second:
                held.append(second.ready_s)
            found = restart_s(first, f"lane-{number % lanes}")
            back.append(found["ready_s"])
            other.append(found["other_lane_answers_s"])
    return {
        "ready_s": spread(cold),
        "ready_with_a_region_that_is_held_s": spread(held),
        "killed_lane_ready_again_s": spread(back),
        "other_lane_answers_after_the_kill_s": spread(other),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {
        "median": round(statistics.median(values), 3), "least": round(min(values), 3), "most": round(max(values), 3)
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pack", type=Path, help="of a pack (default: a small one is made, and its making timed)")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny", help="of the small one (default: tiny)")
    parser.add_argument("--lanes", type=int, default=2, choices=range(2, 9), metavar="N", help="2 to 8 (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, choices=range(1, 101), metavar="N", help="default: 5")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="exw-") as name:
        folder = Path(name)
        pack, pack_s = (asked.pack, None) if asked.pack else make_pack(folder, asked.preset)
        inspected = subprocess.run([*CLI, "inspect", "--json", str(pack)], check=True, capture_output=True)
        said = json.loads(inspected.stdout)
        figures = measure(pack, asked.lanes, asked.rounds)
    described = {
        "architecture": said["architecture"], "fingerprint": said["fingerprint"], "bytes": said["bytes"],
        "region_bytes": said["experts"]["bytes"], "format": said["experts"]["format"],
        "made_from": "the user's" if asked.pack else f"preset {asked.preset}, random values",
    }  # fmt: skip
    result = frame(
        "bench.startup", _told(words), pack=described, conditions={"lanes": asked.lanes, "rounds": asked.rounds},
        packages=("torch", "grpcio", "expressway"),
    )  # fmt: skip
    write({**result, "pack_s": pack_s and round(pack_s, 3), **figures}, asked.out)
    return 0


def _told(words: list[str]) -> list[str]:
    """The command line without paths of this machine."""
    hidden = ("--out", "--pack")
    return [w for k, w in enumerate(words) if w not in hidden and (k == 0 or words[k - 1] not in hidden)]


if __name__ == "__main__":
    sys.exit(main())
