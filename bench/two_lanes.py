"""Two lanes on one region: each writes alone, then both at once; the aggregate is time-aligned (`bench.aligned`).

A synthetic model (bench.synthetic) is held by this process as an owner holds one. Lanes are real processes over their
sockets; each goes through a closed loop of answers along the model's walk, no drafts, one conversation at a time. Also
told: the region's pages over all processes and, with --read, how fast prompts of that length are read alone and by both
at once. Not here: a coordinator and doors (`expressway bench` drives those).

    python -m bench.two_lanes --device cuda --vram-budget 16GiB

Lanes have the cores that `serve` would give them, and this process, which asks, keeps to those that are left.
Invariant: an answer that is not the walk is an error, not a figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc

from bench import asked
from bench.aligned import Rules, Stamp, Stream, aligned_aggregate
from bench.memory import region_memory
from bench.prefill import Reading, read
from bench.result import frame, write
from bench.second_lane import Child, StartFailed, running
from bench.synthetic.__main__ import described
from bench.synthetic.pack import SEED, Synthetic, made
from bench.synthetic.shape import SHAPES
from bench.synthetic.walk import Walk
from coordinator.cores import layout, ranges
from laneproto.v1 import lane_pb2, lane_pb2_grpc
from lanes.config import parse_cores
from shared_experts.owner import run_directory

PROMPT_TOKENS = 64
ANSWER_LIMIT_S = 600.0
SAID = ("vram_budget", "expert_share", "prefill_chunk", "prompt_reading")  # events of a lane's log
SPLIT = ("bias", "link_us", "cpu_us", "cpu_start_us")  # of its `expert_split`, said as it writes

Figures = dict[str, Any]


class Writer:
    """One lane's closed loop; the walk goes on from answer to answer."""

    def __init__(self, synthetic: Synthetic, socket: Path, place: int, tokens: int) -> None:
        self._walk, self._socket, self._place, self._tokens = synthetic.walk, socket, place, tokens
        self.hits = self.misses = 0

    def answer(self) -> Stream:
        """The next one."""
        prompt = self._walk.stretch(self._place, PROMPT_TOKENS)
        self._place += PROMPT_TOKENS
        request = lane_pb2.GenerateRequest(
            request_id=f"write-{time.monotonic_ns()}-{self._place}", prompt_ids=prompt, max_tokens=self._tokens
        )
        ids: list[int] = []
        stamps: list[Stamp] = []
        began_s = time.monotonic()
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            for event in lane_pb2_grpc.LaneStub(channel).Generate(request, timeout=ANSWER_LIMIT_S):
                for token in event.tokens.tokens if event.HasField("tokens") else ():
                    ids.append(token.id)
                    stamps.append(Stamp(token.stamp_ns / 1e9))
        finished = event.finished
        if finished.error_code:
            raise StartFailed(f"{finished.error_code}: {finished.error_message}")
        if ids != self._walk.stretch(self._place, self._tokens):
            raise StartFailed("an answer is not the walk")
        self._place += self._tokens
        self.hits += finished.counters.expert_hits
        self.misses += finished.counters.expert_misses
        return Stream(began_s, max(time.monotonic(), stamps[-1].at_s), tuple(stamps))

    def loop(self, until_s: float) -> list[Stream]:
        """Answers until that time; the one that runs then is finished."""
        found = [self.answer()]
        while time.monotonic() < until_s:
            found.append(self.answer())
        return found


def options(chosen: argparse.Namespace, synthetic: Synthetic, run: Path, number: int) -> list[str]:
    """Of lane `number`."""
    cores = chosen.cores[number : number + 1]
    return [
        "lanes", "--owner", str(run / "owner.sock"), "--pack", str(synthetic.folder), "--name", f"lane-{number}",
        "--listen", f"unix:{run}/lane-{number}.sock", "--device", chosen.device, "--drafts", "0", "--vram-budget",
        chosen.vram_budget, "--context", str(max(PROMPT_TOKENS + chosen.tokens, chosen.read) + 8),
        *(("--prefill-chunk", str(chosen.prefill_chunk)) if chosen.prefill_chunk else ()),
        *(("--cores", *cores) if cores else ()),
    ]  # fmt: skip


def keep_off(lanes_cores: Sequence[str], allowed: Sequence[int]) -> str:
    """This process keeps to cores that no lane has, where there are any; which, told."""
    left = set(allowed).difference(*(parse_cores(own, frozenset(allowed)) for own in lanes_cores))
    if not lanes_cores or not left:
        return "any"
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, left)
    return ranges(left)


def started(chosen: argparse.Namespace, synthetic: Synthetic, run: Path, stack: ExitStack) -> list[Child]:
    """Both lanes, which start side by side."""
    lanes = []
    for number in range(2):
        if chosen.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # of the process that starts now
        lanes.append(stack.enter_context(running(*options(chosen, synthetic, run, number))))
    for lane in lanes:
        lane.event("lane_ready")
    return lanes


def shown(reading: Reading) -> Figures:
    """Of one prompt; what a lane counts of its link is null where nothing came over one."""
    streamed = reading.streaming_ns or None
    return {
        "tokens_per_s": round(reading.tokens / reading.seconds, 1), "first_token_s": round(reading.seconds, 4),
        **{k: v for k, v in asdict(reading).items() if not k.endswith("_ns")},
        "streaming_s": streamed and round(streamed / 1e9, 4),
        "stream_wait_s": streamed and round(reading.stream_wait_ns / 1e9, 4),
    }  # fmt: skip


def readings(walk: Walk, sockets: Sequence[Path], tokens: int, pool: ThreadPoolExecutor, repeats: int = 1) -> Figures:
    """Each lane reads a prompt to warm up; then, so often, one alone and one while the other lane reads one.

    All prompts differ. `of_alone`: medians of a lane's time alone / beside the other.
    """
    number = 0

    def prompt() -> list[int]:
        nonlocal number
        number += 1
        return walk.stretch(number * 997, tokens)

    cold = [read(socket, prompt()) for socket in sockets]
    alone, beside = list[list[Reading]](), list[list[Reading]]()
    for _ in range(repeats):
        alone.append([read(socket, prompt()) for socket in sockets])
        beside.append(list(pool.map(read, sockets, [prompt() for _ in sockets])))

    def median_s(found: list[list[Reading]], lane: int) -> float:
        return statistics.median(each[lane].seconds for each in found)

    return {
        "prompt_tokens": tokens, "cold": [shown(r) for r in cold], "alone": [shown(r) for each in alone for r in each],
        "beside": [shown(r) for each in beside for r in each],
        "of_alone": [round(median_s(alone, lane) / median_s(beside, lane), 3) for lane in range(len(sockets))],
    }  # fmt: skip


def told(lanes: dict[str, list[Stream]], rules: Rules) -> Figures:
    """An aggregate as it is written down."""
    found = aligned_aggregate(lanes, rules)
    return {
        "tokens_per_s": round(found.tokens_per_s, 2), "window_s": round(found.window_s, 2), "tokens": found.tokens,
        "lanes_tokens_per_s": {name: round(found.lane_tokens_per_s(name), 2) for name in lanes},
        "valid": found.valid, "reasons": list(found.reasons),
    }  # fmt: skip


def split(lane: Child) -> Figures:
    """What the lane last found an expert to take by link and by CPU, in us, as it writes."""
    said = lane.said("expert_split")
    return {name: said.get(name) for name in SPLIT}


def measured(synthetic: Synthetic, run: Path, chosen: argparse.Namespace) -> Figures:
    """Every figure of the result."""
    with synthetic.lend(run / "owner.sock"), ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        allowed = sorted(os.sched_getaffinity(0))
        if not chosen.cores and chosen.device == "cuda":
            chosen.cores = [ranges(own) for own in layout(allowed, 2, gpu=True).lanes]
        lanes = started(chosen, synthetic, run, stack)
        asker = keep_off(chosen.cores, allowed)  # lanes have been started with all
        sockets = [run / f"lane-{number}.sock" for number in range(2)]
        half = len(synthetic.walk.order) // 2
        writers = [Writer(synthetic, run / f"lane-{number}.sock", number * half, chosen.tokens) for number in range(2)]

        def both(seconds: float) -> dict[str, list[Stream]]:
            until_s = time.monotonic() + seconds
            found = pool.map(Writer.loop, writers, [until_s] * 2)
            return {f"lane-{number}": streams for number, streams in enumerate(found)}

        prompts = readings(synthetic.walk, sockets, chosen.read, pool) if chosen.read else None
        both(chosen.warm_s)
        alone = []
        for number, writer in enumerate(writers):
            streams = {f"lane-{number}": writer.loop(time.monotonic() + chosen.alone_s)}
            alone.append({**told(streams, Rules(min_window_s=chosen.alone_s / 2)), "split": [split(lanes[number])]})
        for writer in writers:
            writer.hits = writer.misses = 0
        found = told(both(chosen.seconds), Rules(min_window_s=0.9 * chosen.seconds))
        together = {**found, "split": [split(lane) for lane in lanes]}
        memory = region_memory(os.getpid(), [lane.pid for lane in lanes])
        said = [{name: lane.said(name) for name in SAID} for lane in lanes]
    rates = [one["tokens_per_s"] for one in alone]
    return {
        "aggregate_tokens_per_s": together["tokens_per_s"],
        "over_one_lane": round(together["tokens_per_s"] / (sum(rates) / 2), 3),
        "efficiency": round(together["tokens_per_s"] / sum(rates), 3),
        "cores_of_who_asks": asker, "together": together, "alone": alone,
        "hit_rates_together": [round(w.hits / max(1, w.hits + w.misses), 4) for w in writers],
        "region": {
            "bytes": memory.region_bytes, "pss_bytes_over_all_processes": memory.mapping_pss_bytes_sum,
            "pages_once": memory.mapping_pss_bytes_sum <= memory.region_bytes,
            "total_pss_bytes": memory.total_pss_bytes, "with_private_copies_bytes": memory.private_copies_bytes,
        },
        "prompts": prompts, "lanes_said": said,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.two_lanes", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--scale", choices=tuple(SHAPES), default="true")
    add("--device", type=asked.device, choices=("cpu", "cuda"), default="cpu")
    add("--vram-budget", type=asked.size, default="16GiB", metavar="SIZE", help="of each lane (default: %(default)s)")
    cores_help = "of lane 0, then of lane 1 (default: of GPU lanes as `serve` deals them, else all)"
    add("--cores", type=asked.cores, action="append", default=[], metavar="LIST", help=cores_help)
    add("--tokens", type=int, default=1024, help="of an answer (default: %(default)s)")
    add("--prefill-chunk", type=int, metavar="ROWS", help="of the lanes (default: their own)")
    add("--read", type=int, default=0, metavar="TOKENS", help="also read prompts of this length (default: none)")
    add("--warm-s", type=float, default=10.0, help="both, before anything is measured (default: %(default)s)")
    add("--alone-s", type=float, default=15.0, help="each lane alone (default: %(default)s)")
    add("--seconds", type=float, default=62.0, help="both at once (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="that make the model")
    add("--out", type=Path, help="also write the object to this file")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with made(folder / "pack", SHAPES[chosen.scale], seed=SEED, threads=chosen.threads) as synthetic:
            found = measured(synthetic, run_directory(folder / "run"), chosen)
            result = frame(
                "bench.two_lanes",
                argv,
                pack=described(synthetic),
                conditions={
                    "device": chosen.device, "vram_budget": chosen.vram_budget, "cores": chosen.cores, "drafts": 0,
                    "conversations_per_lane": 1, "rules": asdict(Rules(min_window_s=0.9 * chosen.seconds)),
                },
                packages=("numpy", "torch", "grpcio"),
            )  # fmt: skip
    write({**result, **found}, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
