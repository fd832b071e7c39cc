"""The main job in one command: a pack, two lanes over one region, two agents at once, the aggregate, the memory proof.

Run by `scripts/demo`. Not here: how the parts work; this file only starts them and shows what they did.
Invariant: everything shown was measured in this run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import grpc
from rich.console import Console

from bench.aligned import Aggregate, Rules, Stream, aligned_aggregate
from bench.client import Answer, ask
from bench.cluster import Cluster, ClusterFailed, free_address
from bench.demo_view import SideBySide, summary
from bench.memory import RegionMemory, region_memory

ROOT = Path(__file__).parents[1]
PACK = ROOT / "deploy" / "demo_model" / "pack"
LANES = 2
# CONTRACTS: a window counts from 10 s where a minute is too long; the lanes are asked for a little more
RULES = Rules(warm_up_s=0.5, min_window_s=10.0)
TALK_S = 14.0
TURN_TOKENS = 192
SMALL = ("--workload", "question", "--window", "10", "--warm-up", "1", "--nonce", "demo")
REPORTS = {
    "demo_closed": ("--concurrency", "1,2,4", "--seconds", "30"),  # solo, one a lane, more than lanes
    "demo_interference": ("--scenario", "interference", "--concurrency", "2", "--rounds", "6"),
}
HINTS = """
Stays up until Ctrl-C; the live page is at http://{page}. In another terminal:

  curl -s http://{http}/v1/chat/completions -H 'content-type: application/json' -N \\
    -d '{{"messages": [{{"role": "user", "content": "Write `add(a, b)`."}}], \
"reasoning_effort": "none", "stream": true}}'
  .venv/bin/expressway generate --address {grpc} --prompt 'def fibonacci(n):' --max-tokens 64
  .venv/bin/expressway status --cluster demo
"""
QUESTIONS = {
    "agent-1": (
        "Can you write `read_lines(path)`? Return the lines of a file.",
        "Write a Python function `sum_of(numbers)` that does this: Return the sum of a list of numbers.",
        "Can you write `is_even(number)`? Check whether a number is even.",
    ),
    "agent-2": (
        "Can you write `to_json(value)`? Serialise a value as JSON.",
        "Can you write `count_words(text)`? Count the words of a text.",
        "Write a Python function `join_paths(first, second)` that does this: Join two paths.",
    ),
}


async def talk(address: str, view: SideBySide) -> list[Answer]:
    """Both agents ask at the same time, question after question, until the common window is long enough."""
    async with grpc.aio.insecure_channel(address) as channel:

        async def agent(name: str, until: float) -> list[Answer]:
            answers: list[Answer] = []
            while not answers or time.monotonic() < until:
                question = QUESTIONS[name][len(answers) % len(QUESTIONS[name])]
                view.begin(name, question)
                answers.append(
                    await ask(
                        channel,
                        question,
                        session=name,
                        max_tokens=TURN_TOKENS,
                        temperature=0.8,
                        seed=len(answers) + 1,
                        chat=True,
                        on_text=lambda text: view.add(name, text),
                    )
                )
            return answers

        until = time.monotonic() + TALK_S
        per_agent = await asyncio.gather(*(agent(name, until) for name in QUESTIONS))
    return [answer for answers in per_agent for answer in answers]


def aggregate(answers: Sequence[Answer]) -> Aggregate:
    """The time-aligned aggregate of everything the lanes wrote."""
    lanes: dict[str, list[Stream]] = {}
    for answer in answers:
        lanes.setdefault(answer.lane, []).append(answer.stream)
    return aligned_aggregate(lanes, RULES)


def report(answers: Sequence[Answer], total: Aggregate, memory: RegionMemory) -> dict[str, object]:
    """The one line for machines."""
    return {
        "lanes": len({a.lane for a in answers}),
        "requests": [
            {
                "session": a.session,
                "lane": a.lane,
                "ttft_s": a.ttft_s,
                "tokens": len(a.stamps_s),
                "finish_reason": a.finish_reason,
            }
            for a in answers
        ],
        "aggregate": {
            "window_s": total.window_s,
            "tokens": total.tokens,
            "tokens_per_s": total.tokens_per_s,
            "valid": total.valid,
            "reasons": list(total.reasons),
        },
        "region": {
            "bytes": memory.region_bytes,
            "mapping_pss_bytes_sum": memory.mapping_pss_bytes_sum,
            "second_lane_added_bytes": memory.last_lane_added_bytes,
        },
    }


def measure(cluster: Cluster, folder: Path, console: Console) -> None:
    """The reports of this cluster, small enough for CI: agents one by one up to twice the lanes, and a victim's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in REPORTS.items():
        argv = [sys.executable, "-m", "bench", "run", "--url", f"http://{cluster.http}/v1", *SMALL, *words]
        done = subprocess.run(
            [*argv, "--out", str(folder / f"{name}.json")], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
        )
        if done.returncode:
            raise ClusterFailed(f"bench run ended with code {done.returncode}")
        console.print(done.stdout, markup=False, soft_wrap=True)


def show_hints(console: Console, http: str, grpc_door: str, page: str) -> None:
    """What to try next. Whatever the terminal's width, a command stays one that can be copied."""
    console.print(HINTS.format(http=http, grpc=grpc_door, page=page), markup=False, soft_wrap=True)


def wait_for_signal() -> None:
    """Returns at the first SIGINT or SIGTERM."""
    waiting = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    signal.sigwait(waiting)


@click.command()
@click.option("--once", is_flag=True, help="Stop everything after the answers instead of staying up.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON line on stdout; the rest goes to stderr.")
@click.option("--report", "report_dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Then measure this cluster as `expressway bench run` does, reports go there.")  # fmt: skip
@click.option("--launcher", type=click.Choice(["local", "ray"]), default="local", show_default=True)
def main(once: bool, as_json: bool, report_dir: Path | None, launcher: str) -> None:
    """Serves two CPU lanes and lets two agents talk at the same time."""
    console = Console(stderr=as_json, highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options = ["--lanes", str(LANES), "--launcher", launcher, "--cluster", "demo"]
        options += ["--http", free_address(8000), "--grpc", free_address(8001), "--page", free_address(8002)]
        with Cluster(PACK, options, quiet=as_json) as cluster:
            console.print(f"[bold]{LANES} lanes ready[/] in {cluster.ready_s:.1f} s")
            with SideBySide(console, list(QUESTIONS)) as view:
                answers = asyncio.run(talk(cluster.grpc, view))
            total = aggregate(answers)
            lanes = [cluster.pids[f"lane-{k}"] for k in range(LANES)]
            memory = region_memory(cluster.pids["owner"], lanes)
            summary(console, answers, total, memory)
            if report_dir is not None:
                measure(cluster, report_dir, console)
            if as_json:
                print(json.dumps(report(answers, total, memory)), flush=True)
            if not once:
                show_hints(console, cluster.http, cluster.grpc, cluster.page)
                wait_for_signal()
        if not once:
            console.print("stopped: nothing of it runs any more")
    except (ClusterFailed, grpc.aio.AioRpcError) as error:
        console.print(f"[red]demo: {error}[/]")
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("stopped before it was done; nothing of it runs any more")
        sys.exit(130)


if __name__ == "__main__":
    main()
