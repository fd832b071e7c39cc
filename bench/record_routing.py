"""Records the routing of a real lane on the demo model: owner and lane as processes, prompts and answers, one trace.

The demo model's weights are random, so its trace shows that recording works and what a random router does, not how a
trained model routes. Not here: replaying (cache_policy). Invariant: nothing started here outlives it.

    python -m bench.record_routing demo.trace && python -m bench.cache_policy --recorded demo.trace
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

from bench.checkpoint import PRESETS, write_checkpoint
from bench.second_lane import READY_LIMIT_S, StartFailed, running
from laneproto.v1 import lane_pb2, lane_pb2_grpc

PROMPT_TOKENS, ANSWER_TOKENS = 600, 200


def ask(stub: lane_pb2_grpc.LaneStub, number: int, vocabulary: int) -> lane_pb2.Counters:
    """One prompt of a few words that come again and again, and its sampled answer; returns the request's counters."""
    words = [(number * 7919 + i * 104729) % (vocabulary - 16) + 16 for i in range(60)]
    ids = [words[(i * i + number) % len(words)] for i in range(PROMPT_TOKENS)]
    sampling = lane_pb2.Sampling(temperature=1.0, seed=number)
    request = lane_pb2.GenerateRequest(
        request_id=f"r{number}", prompt_ids=ids, max_tokens=ANSWER_TOKENS, sampling=sampling
    )
    finished = list(stub.Generate(request, timeout=READY_LIMIT_S))[-1].finished
    if finished.error_code:
        raise StartFailed(f"{finished.error_code}: {finished.error_message}")
    counters: lane_pb2.Counters = finished.counters
    return counters


def record(pack: Path, run: Path, out: Path, requests: int, budget: str) -> dict[str, object]:
    """Runs the lane; returns its counters."""
    manifest = json.loads(
        subprocess.run(
            [sys.executable, "-m", "shared_experts", "inspect", "--json", str(pack)], check=True, capture_output=True
        ).stdout
    )
    totals = dict.fromkeys(lane_pb2.Counters.DESCRIPTOR.fields_by_name, 0)
    lane = (
        "lanes", "--owner", str(run / "owner.sock"), "--pack", str(pack), "--listen", f"unix:{run}/lane-0.sock",
        "--vram-budget", budget, "--trace-routing", str(out.absolute()),
    )  # fmt: skip
    with running("shared_experts", "own", "--pack", str(pack), "--run-dir", str(run)) as owner:
        owner.event("owner_ready")
        with running(*lane) as child:
            child.event("lane_ready")
            with grpc.insecure_channel(f"unix:{run}/lane-0.sock") as channel:
                for number in range(requests):
                    counters = ask(lane_pb2_grpc.LaneStub(channel), number, manifest["config"]["vocab_size"])
                    for name in totals:
                        totals[name] += getattr(counters, name)
    return {**totals, "decode_ms_per_token": totals["decode_ns"] / 1e6 / (requests * (ANSWER_TOKENS - 1))}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the trace and prints the lane's counters."""
    parser = argparse.ArgumentParser(prog="python -m bench.record_routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the trace; a new file")
    parser.add_argument("--requests", type=int, default=8, help="default: 8")
    parser.add_argument("--vram-budget", default="2MiB", help="of the lane (default: 2MiB)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "checkpoint", PRESETS["demo"], 0)
        command = ["pack", str(folder / "checkpoint"), str(folder / "pack"), "--experts", "q4g64"]
        subprocess.run([sys.executable, "-m", "shared_experts", *command], check=True, stdout=sys.stderr)
        (folder / "run").mkdir(mode=0o700)
        counted = record(folder / "pack", folder / "run", options.out, options.requests, options.vram_budget)
    sys.stdout.write(json.dumps(counted, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
