"""A short request behind a long prompt on one real lane: how many chunks it waits, and what it costs the long one.

Starts a cluster with one lane on a pack, sends a prompt of --long-tokens and, at moments spread over its reading, short
requests; every answer says how many windows of the other its lane ran before it began (`usage.waited_windows`).
Not here: several lanes, quality. Times are of this run only; the count of chunks is what must hold.

    python -m bench.visits PACK --long-tokens 100000 --shorts 12 --out bench/results/visits.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.cluster import Cluster, free_address
from bench.result import frame, write
from laneproto.v1 import serve_pb2, serve_pb2_grpc


@dataclass(frozen=True, slots=True)
class Answered:
    """One request, in seconds of this process's clock."""

    asked_s: float
    first_token_s: float
    end_s: float
    waited_windows: int
    ids: tuple[int, ...]


async def ask(channel: grpc.aio.Channel, ids: Sequence[int], max_tokens: int) -> Answered:
    """Greedy, not ended by the model."""
    request = serve_pb2.GenerateRequest(
        token_ids=serve_pb2.TokenIds(ids=ids), max_tokens=max_tokens, temperature=0.0, ignore_eos=True
    )
    asked, first, tokens, waited = time.monotonic(), 0.0, [], 0
    async for event in serve_pb2_grpc.ExpresswayStub(channel).Generate(request):
        kind = event.WhichOneof("event")
        if kind == "delta" and event.delta.tokens:
            first = first or time.monotonic()
            tokens += [token.id for token in event.delta.tokens]
        elif kind == "finished":
            waited = event.finished.usage.waited_windows
    return Answered(asked, first, time.monotonic(), waited, tuple(tokens))


def prompt(tokens: int, seed: int, vocabulary: int = 256) -> list[int]:
    """Made-up ids that every pack has."""
    return [(seed * 7919 + k * k * 31 + k * 17) % vocabulary for k in range(tokens)]


async def measure(address: str, long_tokens: int, shorts: int, short_tokens: int) -> dict[str, object]:
    """The long one alone, then with short ones, then one short one after it."""
    async with grpc.aio.insecure_channel(address) as channel:
        await ask(channel, prompt(64, 1), 8)  # rates are known from here on
        began = time.monotonic()
        alone = await ask(channel, prompt(long_tokens, 2), 4)
        read_s = alone.first_token_s - began
        task = asyncio.create_task(ask(channel, prompt(long_tokens, 3), 4))
        visits = []
        for number in range(shorts):
            await asyncio.sleep(read_s / (shorts + 1))
            if not task.done():
                visits.append(await ask(channel, prompt(short_tokens, 10 + number), 4))
        long = await task
        visitors = [visit for visit in visits if visit.end_s < long.first_token_s]
        idle = [await ask(channel, prompt(short_tokens, 50 + number), 4) for number in range(5)]
        again = await ask(channel, prompt(long_tokens, 3), 4)
    return {
        "long_alone_s": read_s,
        "long_with_visits_s": long.first_token_s - long.asked_s,
        "same_answer": long.ids == again.ids,
        "short_requests": len(visits),
        "visits": len(visitors),
        "waited_chunks": sorted(visit.waited_windows for visit in visitors),
        "waited_chunks_max": max((visit.waited_windows for visit in visitors), default=None),
        "short_first_token_s": {
            "visiting": statistics.median([v.first_token_s - v.asked_s for v in visitors] or [0.0]),
            "on an idle lane": statistics.median([one.first_token_s - one.asked_s for one in idle]),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object; 1 when a visitor waited for more than two chunks, or none visited."""
    parser = argparse.ArgumentParser(prog="python -m bench.visits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--long-tokens", type=int, default=20_000, help="of the long prompt (default: %(default)s)")
    parser.add_argument("--short-tokens", type=int, default=64, help="of a short one (default: %(default)s)")
    parser.add_argument("--shorts", type=int, default=8, help="short requests (default: %(default)s)")
    parser.add_argument("--serve", default="", help="further options of `expressway serve`, separated by spaces")
    parser.add_argument("--out", type=Path, help="also write the result there")
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    serve = ["--http", free_address(0), "--grpc", free_address(0), "--page", free_address(0), *options.serve.split()]
    with Cluster(options.pack, serve, quiet=True) as cluster:
        found = asyncio.run(measure(cluster.grpc, options.long_tokens, options.shorts, options.short_tokens))
    conditions = {"long_tokens": options.long_tokens, "short_tokens": options.short_tokens, "serve": options.serve}
    shown = ["PACK", *(word for word in arguments if word != str(options.pack))]
    write(frame("bench.visits", shown, pack={"name": options.pack.name}, conditions=conditions) | found, options.out)
    return 0 if found["visits"] and int(str(found["waited_chunks_max"])) <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
