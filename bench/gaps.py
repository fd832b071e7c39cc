"""How far gaps between events are from those of their tokens, with and without a coordinator: `python -m bench.gaps`.

    direct    the client reads every lane itself; the coordinator has nothing to do
    gRPC      the same streams through the coordinator
    HTTP      the same as server-sent events

by turns, another one first each round. Lanes make a token every `--pace-ms` (simulated, of a source checkout's tests);
each lane, the coordinator (with traces and a page) and the client are processes of their own. A gap's move is
|(arrival - arrival before) - (stamp - stamp before)|; what the machine itself moves stands in the direct rows, so what
a coordinator adds is the difference. Not here: what a real lane's own gaps are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio

from bench import result
from laneproto.v1 import lane_pb2, lane_pb2_grpc, serve_pb2, serve_pb2_grpc

ROOT = Path(__file__).parents[1]
PROMPT = [5, 6, 7]
TRACE_S = 60.0
Stream = list[tuple[float, float]]  # of each event: arrival and its last token's stamp, seconds of one clock


@contextlib.contextmanager
def cluster(lanes: int, pace_s: float) -> Iterator[dict[str, Any]]:
    """The processes, ready."""
    argv = [sys.executable, "-m", "tests.fakes.paced_cluster", "--lanes", str(lanes), "--pace-s", str(pace_s)]
    child = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise SystemExit("the cluster did not start; it needs a source checkout")
        yield json.loads(line)
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


async def direct(address: str, tokens: int, number: int) -> Stream:
    """One stream from a lane."""
    seen: Stream = []
    request = lane_pb2.GenerateRequest(request_id=f"direct-{number}", prompt_ids=PROMPT, max_tokens=tokens)
    async with grpc.aio.insecure_channel(address) as channel:
        async for event in lane_pb2_grpc.LaneStub(channel).Generate(request):
            if event.tokens.tokens:
                seen.append((time.monotonic(), event.tokens.tokens[-1].stamp_ns / 1e9))
    return seen


async def over_grpc(address: str, tokens: int) -> Stream:
    """One stream through the coordinator."""
    seen: Stream = []
    request = serve_pb2.GenerateRequest(
        token_ids=serve_pb2.TokenIds(ids=PROMPT), max_tokens=tokens, ignore_eos=True
    )  # fmt: skip
    async with grpc.aio.insecure_channel(address) as channel:
        async for event in serve_pb2_grpc.ExpresswayStub(channel).Generate(request):
            if event.delta.tokens:
                seen.append((time.monotonic(), event.delta.tokens[-1].stamp_ns / 1e9))
    return seen


async def over_http(address: str, tokens: int, traces: Path) -> Stream:
    """The same as events over a bare socket; stamps come from the request's trace, none where events were joined."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    arrivals, request_id = [], ""
    async for line in reader:
        if line.lower().startswith(b"x-request-id:"):
            request_id = line.partition(b":")[2].strip().decode()
        if line.startswith(b"data: {") and b'"text":"x"' in line:
            arrivals.append(time.monotonic())
    writer.close()
    stamps_s = await asyncio.to_thread(traced, traces, request_id)
    return list(zip(arrivals, stamps_s, strict=True)) if len(arrivals) == len(stamps_s) else []


def traced(traces: Path, request_id: str) -> Sequence[float]:
    """Stamps of one request; the trace is written a moment after the answer's end."""
    until = time.monotonic() + TRACE_S
    while time.monotonic() < until:
        for path in traces.iterdir():
            for line in path.read_text().splitlines():
                if request_id in line and line.endswith("}"):
                    stamps: Sequence[float] = json.loads(line)["stamps_s"]
                    return stamps
        time.sleep(0.1)
    return ()


def moves(streams: Sequence[Stream]) -> list[float]:
    """Of all gaps, ascending, in seconds."""
    return sorted(
        abs((b[0] - a[0]) - (b[1] - a[1])) for stream in streams for a, b in pairwise(stream)
    )  # fmt: skip


def shown(found: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    if not found:
        return {"gaps": 0}
    parts = {"p50": found[len(found) // 2], "p99": found[int(0.99 * (len(found) - 1))], "most": found[-1]}
    return {"gaps": len(found), **{name: round(1e3 * each, 2) for name, each in parts.items()}}


async def measure(at: dict[str, Any], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """All rounds."""
    lanes, found = at["lanes"], []
    ways: dict[str, Callable[[int], Awaitable[Stream]]] = {
        "direct": lambda k: direct(lanes[k], tokens, k),
        "grpc": lambda k: over_grpc(at["grpc"], tokens),
        "http": lambda k: over_http(at["http"], tokens, Path(at["traces"])),
    }
    for number in range(-1, rounds):
        seen: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
        for way in sorted(ways, key=lambda way: (list(ways).index(way) + number) % len(ways)):
            streams = await asyncio.gather(*(ways[way](k) for k in range(len(lanes))))
            seen[way] = shown(moves(streams))
        if number >= 0:  # the first one warms up
            found.append(seen)
            print(json.dumps(seen), file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with cluster(options.streams, options.pace_ms / 1e3) as at:
        found = asyncio.run(measure(at, options.tokens, options.rounds))
    median = {
        way: {part: sorted(each[way].get(part, 0.0) for each in found)[len(found) // 2] for part in ("p50", "p99")}
        for way in ("direct", "grpc", "http")
    }
    conditions = {name: getattr(options, name) for name in ("streams", "tokens", "rounds", "pace_ms")}
    framed = result.frame("bench.gaps", [], pack={}, packages=("aiohttp", "grpcio"), conditions=conditions)
    result.write({**framed, "median_moved_ms": median, "rounds": found}, options.out)


if __name__ == "__main__":
    main()
