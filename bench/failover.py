"""Answers under lane kills against undisturbed ones: `python -m bench.failover PACK`.

Several streams ask a running cluster the same greedy questions again and again while busy lanes are killed. Every
answer is compared with the one that the same question got before any kill. Not here: how the coordinator heals
(dispatch). An answer that parts from its truth is judged by the model itself once the cluster is gone (near_tie); the
result has every parting.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc

from bench import result
from bench.cluster import Cluster, free_address
from bench.near_tie import choice, parting
from laneproto.v1 import admin_pb2, admin_pb2_grpc, lane_pb2, serve_pb2, serve_pb2_grpc

REPLAYS = 2  # lanes that may be lost under an answer

Ids = tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What the streams saw."""

    equal: int = 0
    parted: list[tuple[Ids, Ids, Ids]] = field(default_factory=list)  # prompt, truth, what was said
    failed: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0


async def ask(stub: serve_pb2_grpc.ExpresswayStub, prompt: list[int], max_tokens: int) -> tuple[Ids | str, float]:
    """An answer, or the code of the error that it got; and the longest pause between two events."""
    request = serve_pb2.GenerateRequest(
        token_ids=serve_pb2.TokenIds(ids=prompt), max_tokens=max_tokens, ignore_eos=True
    )
    ids: list[int] = []
    longest_s, last = 0.0, time.monotonic()
    try:
        async for event in stub.Generate(request):
            longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
            ids += [token.id for token in event.delta.tokens]
            if event.HasField("finished") and event.finished.reason == lane_pb2.FINISH_REASON_ERROR:
                return event.finished.error_code, longest_s
    except grpc.aio.AioRpcError as error:
        return str(error.code()), longest_s
    return tuple(ids), longest_s


async def kill_lanes(page: str, admin: admin_pb2_grpc.AdminStub, kills: int, end: float) -> int:
    """Kills busy lanes, one at a time, while another one serves; how many.

    An answer may lose two lanes and not three: a lane is spared while it has one that has lost two.
    """
    chance, killed = random.Random(0), 0  # noqa: S311  which lane, nothing secret
    losses: Counter[str] = Counter()  # by request
    async with aiohttp.ClientSession(f"http://{page}") as http:
        while losses["all"] < kills and time.monotonic() < end:
            await asyncio.sleep(chance.uniform(0.1, 0.4))
            async with http.get("/snapshot") as response:
                lanes = (await response.json())["lanes"]
            for lane in lanes:
                if lane["state"] in ("dead", "quarantined"):  # by intention: no wait, and no quarantine after the third
                    await admin.Undrain(admin_pb2.LaneName(lane=lane["name"]))
            serving = [lane for lane in lanes if lane["state"] in ("ready", "busy") and lane["pid"] != killed]
            victims = [
                lane for lane in serving if lane["work"] and all(losses[w["id"]] < REPLAYS for w in lane["work"])
            ]
            if len(serving) < 2 or not victims:
                continue
            victim = chance.choice(victims)
            killed = victim["pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed, signal.SIGKILL)
                losses.update(["all", *(work["id"] for work in victim["work"])])
    return losses["all"]


async def run(cluster: Cluster, options: argparse.Namespace) -> tuple[Tally, dict[str, object]]:
    """Streams and kills."""
    prompts = [[3 + (17 * stream + step) % 200 for step in range(12)] for stream in range(options.streams)]
    tally, stop = Tally(), asyncio.Event()
    async with (
        grpc.aio.insecure_channel(cluster.grpc) as channel,
        grpc.aio.insecure_channel(f"unix:{cluster.run_dir}/coordinator.sock") as operator,
    ):
        stub = serve_pb2_grpc.ExpresswayStub(channel)
        truths: list[Ids] = []
        for prompt in prompts:
            said, _ = await ask(stub, prompt, options.max_tokens)
            assert isinstance(said, tuple), said
            truths.append(said)

        async def stream(number: int) -> None:
            while not stop.is_set():
                said, pause_s = await ask(stub, prompts[number], options.max_tokens)
                tally.longest_pause_s = max(tally.longest_pause_s, pause_s)
                if isinstance(said, str):
                    tally.failed.append(said)
                elif said == truths[number]:
                    tally.equal += 1
                else:
                    tally.parted.append((tuple(prompts[number]), truths[number], said))

        begin = time.monotonic()
        streams = [asyncio.create_task(stream(number)) for number in range(options.streams)]
        admin = admin_pb2_grpc.AdminStub(operator)
        kills = await kill_lanes(options.page, admin, options.kills, begin + options.seconds)
        stop.set()
        await asyncio.gather(*streams)
    seconds = round(time.monotonic() - begin, 1)
    return tally, {"kills": kills, "streams": options.streams, "seconds": seconds}


def judged(pack: Path, tally: Tally) -> dict[str, object]:
    """The result's part about answers: each that parted from its truth, and whether the model hardly chose there."""
    partings: list[dict[str, object]] = []
    for prompt, truth, said in tally.parted:
        place = parting(truth, said)
        if place is None or place >= min(len(truth), len(said)):
            partings.append({"place": place, "near": False, "tokens": [len(truth), len(said)]})
            continue
        found = choice(pack, [*prompt, *truth[:place]], truth[place], said[place])
        partings.append(
            {"place": place, "near": found.near, "apart": round(found.apart, 6), "allowed": round(found.allowed, 6)}
        )
    near = sum(bool(each["near"]) for each in partings)
    return {
        "equal": near == len(partings) and not tally.failed,
        "answers": {
            "equal": tally.equal, "margin_equal": near, "different": len(partings) - near,
            "failed": sorted(tally.failed),
        },
        "partings": partings,
        "longest_pause_s": round(tally.longest_pause_s, 3),
    }  # fmt: skip


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="give up killing after so long")
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.page = free_address(8002)
    serve = ["--lanes", str(options.lanes), "--cluster", f"failover-{os.getpid()}", "--http", "127.0.0.1:0"]
    with Cluster(options.pack, [*serve, "--grpc", "127.0.0.1:0", "--page", options.page], quiet=True) as cluster:
        tally, measured = asyncio.run(run(cluster, options))
    framed = result.frame(
        "bench.failover", ["PACK", *(word for word in sys.argv[1:] if "/" not in word and word != "--out")],
        pack={"name": options.pack.name}, packages=("expressway", "grpcio"),
        conditions={"lanes": options.lanes, "max_tokens": options.max_tokens, "device": "cpu", "greedy": True},
    )  # fmt: skip
    result.write({**framed, **measured, **judged(options.pack, tally)}, options.out)


if __name__ == "__main__":
    main()
