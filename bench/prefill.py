"""Prompt reading: tokens a second and time to the first token by prompt length, cold and warm, beside the bound.

Lanes are real processes over their sockets; a synthetic model's walk (bench.synthetic) gives the prompts, no two of
which begin alike, so nothing is remembered. For each length a lane starts, reads one prompt with what its self-test
left in the expert cache (cold) and others with what that prompt left (warm). With two lanes, each reads alone, then
both at once.

    python -m bench.prefill --scale gigabyte --sizes 512,1536,4096 --vram-budget 120MiB --lanes 2
    python -m bench.prefill --device cuda --prefill-chunk 8192 --lanes 2 --cores 0-15 --cores 16-31
    python -m bench.prefill --scale small --sizes 2048 --sweep prefill-chunk=64,256,1024       any option of a lane
    python -m bench.prefill --device cuda --sizes 32768 --rings 1,2,3,16,64,256              slots of a GPU lane's ring

Bytes are the lane's own counts. The bound counts what had to come, once a window: the chosen experts outside the cache
(on a CPU lane, which reads every expert from the same memory, all chosen ones). What crossed is that or, where experts
were copied ahead of their routing, more. Utilisation is bytes that crossed over (the whole time to the first token
times the measured rate); overlap is the share of the copies' time in which the GPU was not waiting for them, both by
its own clock. The gap is what the first token took beyond the bound. Not here: the region (bench.synthetic), ceilings
(bench.decode_lane).

Invariant: a reading that remembered a token of its prompt is an error, not a figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from bench import asked
from bench.bound import Ceilings, prompt_s
from bench.decode import job
from bench.result import frame, write
from bench.second_lane import StartFailed, running
from bench.synthetic.__main__ import described
from bench.synthetic.pack import Synthetic, made
from bench.synthetic.shape import SHAPES
from laneproto.v1 import lane_pb2, lane_pb2_grpc
from shared_experts.owner import run_directory

SIZES = "512,1536,4096,15360,32768,112640"
READING_LIMIT_S = 3600.0
CHOICES = ("prefill_chunk", "layer_pace", "prompt_reading")  # events of a lane's log
LONG = 32768  # whose figures stand at the top of a result

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt, read to its first token."""

    tokens: int
    began_ns: int  # CLOCK_MONOTONIC, as are the lanes' stamps
    first_token_ns: int
    prefill_ns: int  # in windows
    windows: int
    cache_bytes: int  # of experts read in the lane's cache, once a window
    region_bytes: int  # of experts read where they lie in the region
    cpu_bytes: int  # of these, by the CPU of a GPU lane
    streamed_bytes: int = 0  # copied for the prompt, chosen or not
    streaming_ns: int = 0
    stream_wait_ns: int = 0
    ahead_tokens: int = 0  # read in passes whose experts came ahead of their routing
    window_tokens: int = 0  # read by decode windows

    @property
    def seconds(self) -> float:
        """From the question to the first token."""
        return (self.first_token_ns - self.began_ns) / 1e9


class Prompts:
    """Stretches of the walk that begin at different places."""

    def __init__(self, synthetic: Synthetic) -> None:
        self._synthetic, self._given = synthetic, 0

    def next(self, tokens: int) -> list[int]:
        """Another one."""
        self._given += 1
        return self._synthetic.walk.stretch(self._given * 997, tokens)


def read(socket: Path, ids: Sequence[int]) -> Reading:
    """Asks for one token; raises StartFailed where the lane fails or remembers a part of the prompt."""
    request = lane_pb2.GenerateRequest(request_id=f"read-{time.monotonic_ns()}", prompt_ids=ids, max_tokens=1)
    first_ns = 0
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        began_ns = time.monotonic_ns()
        for event in lane_pb2_grpc.LaneStub(channel).Generate(request, timeout=READING_LIMIT_S):
            if event.HasField("tokens"):
                first_ns = event.tokens.tokens[0].stamp_ns
    finished = event.finished
    if finished.error_code:
        raise StartFailed(f"{finished.error_code}: {finished.error_message}")
    counted = finished.counters
    if counted.prompt_tokens != len(ids):
        raise StartFailed(f"of a prompt of {len(ids)} tokens {counted.prompt_tokens} were read")
    return Reading(
        len(ids), began_ns, first_ns, counted.prefill_ns, counted.windows, counted.expert_hit_bytes,
        counted.expert_miss_bytes, counted.expert_cpu_bytes, counted.streamed_bytes, counted.streaming_ns,
        counted.stream_wait_ns, counted.ahead_tokens, counted.window_tokens,
    )  # fmt: skip


class Bench:
    """A synthetic model that is lent, and how its lanes are to be started."""

    def __init__(self, synthetic: Synthetic, run: Path, chosen: argparse.Namespace) -> None:
        self.synthetic, self.run, self.chosen = synthetic, run, chosen
        self.prompts = Prompts(synthetic)
        self.said: Figures = {}  # what the last lane logged of its choices

    def options(self, number: int, more: Sequence[str] = ()) -> list[str]:
        """Of lane `number`."""
        chosen, run = self.chosen, self.run
        cores = chosen.cores[number : number + 1]
        context = max(chosen.sizes) + 8
        return [
            "--owner", str(run / "owner.sock"), "--pack", str(self.synthetic.folder), "--name", f"lane-{number}",
            "--listen", f"unix:{run}/lane-{number}.sock", "--device", chosen.device, "--drafts", "0",
            "--vram-budget", chosen.vram_budget, "--context", str(context),
            *(("--prefill-chunk", str(chosen.prefill_chunk)) if chosen.prefill_chunk else ()),
            *(("--cores", *cores) if cores else ()), *more,
        ]  # fmt: skip

    @contextmanager
    def lane(self, number: int, more: Sequence[str] = (), module: Sequence[str] = ("lanes",)) -> Iterator[Path]:
        """Its socket, while it runs."""
        if self.chosen.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # of the process that starts now
        with running(*module, *self.options(number, more)) as child:
            child.event("lane_ready")
            self.said = {name: child.said(name) for name in CHOICES if child.said(name)}
            yield self.run / f"lane-{number}.sock"

    def by_length(
        self, more: Sequence[str] = (), module: Sequence[str] = ("lanes",)
    ) -> list[tuple[str, Reading]]:  # fmt: skip
        """(cold or warm, reading) of every length."""
        found = []
        for size in self.chosen.sizes:
            with self.lane(0, more, module) as socket:
                found.append(("cold", read(socket, self.prompts.next(size))))
                found += [("warm", read(socket, self.prompts.next(size))) for _ in range(self.chosen.repeats)]
        return found

    def together(self, size: int) -> Figures:
        """Two lanes, warm: each alone, then both at once, as often as the others are repeated."""
        rates: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        overlaps = []
        with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
            sockets = [stack.enter_context(self.lane(number)) for number in range(2)]
            for socket in sockets:
                read(socket, self.prompts.next(size))
            for _ in range(self.chosen.repeats):
                for (alone, _), socket in zip(rates, sockets, strict=True):
                    alone.append(size / read(socket, self.prompts.next(size)).seconds)
                both = list(pool.map(read, sockets, [self.prompts.next(size) for _ in sockets]))
                for (_, beside), reading in zip(rates, both, strict=True):
                    beside.append(size / reading.seconds)
                shared_ns = min(r.first_token_ns for r in both) - max(r.began_ns for r in both)
                overlaps.append(shared_ns / 1e9 / max(r.seconds for r in both))
        return {
            "prompt_tokens": size,
            "lanes": [
                {
                    "alone_tokens_per_s": round(statistics.median(alone), 1),
                    "beside_tokens_per_s": round(statistics.median(beside), 1),
                    "of_alone": round(statistics.median(beside) / statistics.median(alone), 3),
                }
                for alone, beside in rates
            ],
            "overlap": round(min(overlaps), 3),
        }


def shown(kind: str, reading: Reading, rates: Ceilings) -> Figures:
    """One reading beside its bound."""
    on_gpu = rates.link is not None
    moved = reading.region_bytes - reading.cpu_bytes + (0 if on_gpu else reading.cache_bytes)
    crossed = max(moved, reading.streamed_bytes)
    bound = prompt_s(moved, rates)
    streaming, waiting = reading.streaming_ns, reading.stream_wait_ns
    return {
        "cache": kind, **{k: v for k, v in asdict(reading).items() if not k.endswith("_ns")},
        "first_token_s": round(reading.seconds, 4),
        "tokens_per_s": round(reading.tokens / reading.seconds, 1),
        "tokens_per_s_in_windows": round(reading.tokens / (reading.prefill_ns / 1e9), 1),
        "crossed_bytes": crossed, "crossed_in_vain": round(1 - moved / max(1, crossed), 4),
        "utilisation": round(prompt_s(crossed, rates) / reading.seconds, 4),
        "streaming_s": round(streaming / 1e9, 4), "stream_wait_s": round(waiting / 1e9, 4),
        "overlap": round(max(0.0, 1 - waiting / streaming), 4) if streaming else None,
        "bound_s": round(bound, 4), "bound_tokens_per_s": round(reading.tokens / bound, 1),
        "gap_s": round(reading.seconds - bound, 4), "times_the_bound": round(reading.seconds / bound, 2),
    }  # fmt: skip


def measured(bench: Bench) -> Figures:
    """Every figure of the result."""
    chosen = bench.chosen
    with bench.synthetic.lend(bench.run / "owner.sock"):
        looks = [job("ceilings", bench.options(0))]
        read_ = bench.by_length()
        said = bench.said
        swept = [
            (name, value, bench.by_length((f"--{name}", value)))
            for name, _, values in (sweep.partition("=") for sweep in chosen.sweep)
            for value in values.split(",")
        ]
        rings = [(slots, bench.by_length((), ("bench.ring_lane", str(slots)))) for slots in chosen.rings]
        together = bench.together(chosen.together or max(chosen.sizes)) if chosen.lanes == 2 else None
        looks.append(job("ceilings", bench.options(0)))
    best = {name: max(look["bytes_per_s"][name] for look in looks) for name in looks[0]["bytes_per_s"]}
    rates = Ceilings(**best)
    prompts = [shown(kind, reading, rates) for kind, reading in read_]
    long = next((row for row in prompts if row["tokens"] == LONG and row["cache"] == "warm"), None)
    return {
        "tokens_per_s_32k": long and long["tokens_per_s"],
        "link_utilisation_32k": long["utilisation"] if long and rates.link is not None else None,
        "prompts": prompts,
        "sweeps": [
            {"option": name, "value": value, "prompts": [shown(kind, reading, rates) for kind, reading in found]}
            for name, value, found in swept
        ],
        "rings": [
            {"slots": slots, "prompts": [shown(kind, reading, rates) for kind, reading in found]}
            for slots, found in rings
        ],
        "two_lanes": together,
        "lane_said": said,
        "ceilings_gb_per_s": {name: round(rate / 1e9, 2) for name, rate in best.items()},
        "bytes_that_count": "over the link" if rates.link is not None else "read by the cores, cache and region",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--scale", choices=tuple(SHAPES), default="true")
    add("--device", type=asked.device, choices=("cpu", "cuda"), default="cpu")
    add("--vram-budget", type=asked.size, default="16GiB", metavar="SIZE", help="of each lane (default: %(default)s)")
    add("--sizes", default=SIZES, help=f"prompt lengths in tokens (default: {SIZES})")
    add("--prefill-chunk", type=int, metavar="ROWS", help="of a lane (default: its own)")
    add("--repeats", type=int, default=1, help="warm readings of each length (default: 1)")
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help="the lengths again with these values; repeatable",
    )
    add("--rings", default="", metavar="SLOTS,SLOTS", help="the lengths again with rings of these sizes (cuda)")
    add("--lanes", type=int, choices=(1, 2), default=1, help="2: also two at once")
    add("--together", type=int, metavar="TOKENS", help="prompt length of two at once (default: the longest)")
    add(
        "--cores",
        type=asked.cores,
        action="append",
        default=[],
        metavar="LIST",
        help="of lane 0, then of lane 1 (default: all)",
    )
    add("--threads", type=int, default=os.cpu_count() or 1, help="that make the model")
    add("--out", type=Path, help="also write the object to this file")
    chosen = parser.parse_args(argv)
    chosen.sizes = [int(size) for size in chosen.sizes.split(",")]
    chosen.rings = [int(slots) for slots in chosen.rings.split(",") if slots]
    if chosen.rings and chosen.device != "cuda":
        parser.error("--rings: a lane on the cpu has no ring")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with made(folder / "pack", SHAPES[chosen.scale], threads=chosen.threads) as synthetic:
            found = measured(Bench(synthetic, run_directory(folder / "run"), chosen))
            result = frame(
                "bench.prefill",
                argv,
                pack=described(synthetic),
                conditions={
                    "device": chosen.device, "vram_budget": chosen.vram_budget, "prefill_chunk": chosen.prefill_chunk,
                    "lanes": chosen.lanes, "cores": chosen.cores, "made_s": synthetic.seconds,
                    "region_page_bytes": synthetic.region.page_bytes,
                },
                packages=("numpy", "torch", "grpcio"),
            )  # fmt: skip
    write({**result, **found}, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
