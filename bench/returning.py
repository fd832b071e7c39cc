"""A conversation that returns to its lane: what its first token waits for, and what it makes others wait for.

One real lane over its socket, a synthetic model's walk (bench.synthetic), the pool's owner a thread of this process. A
long conversation is read once, then in turn:

    stayed     its next turn, nobody was there meanwhile
    other      a short conversation that nobody knows, at once after it: nothing of the long one's turn is parked yet
    alone      the same, at once after another short one: what of `other` is not the long one's leaving
    returned   the long one's next turn, after the short ones and once the lane has parked what waits
    parked     a short one once that is parked, too: what of `other` is not its parking
    returned   once more

Where a return comes from is the lane's word, not the budget's: the lane's memory, the pool, or it was read again. A
lane's memory is --state-budget and one conversation of full length: with 512 MiB a long one may stay there beside the
short ones, with 64 MiB it must go.

    python -m bench.returning --device cuda --vram-budget 16GiB --prefill-chunk 8192 --cores 0-15 --state-budget 64MiB

Seconds are from the question to the first token's stamp, medians over --repeats. Not here: copies alone (parking),
bits (conversations). Invariant: an answer that is not the walk is an error, not a figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench import asked
from bench.result import frame, write
from bench.second_lane import StartFailed, running
from bench.synthetic.__main__ import described
from bench.synthetic.pack import Synthetic, made
from bench.synthetic.shape import SHAPES
from laneproto.chain import BLOCK_TOKENS
from laneproto.v1 import lane_pb2, lane_pb2_grpc
from shared_experts.owner import run_directory
from shared_experts.park_server import ParkServer

ANSWER_TOKENS = 8
LIMIT_S = 600.0
PARKED_WITHIN_S = 60.0

ROUND = ("stayed", "other", "alone", "returned", "parked", "returned")

Figures = dict[str, Any]


class Asker:
    """The lane's client."""

    def __init__(self, synthetic: Synthetic, channel: grpc.Channel) -> None:
        self._walk, self._stub, self._asked = synthetic.walk, lane_pb2_grpc.LaneStub(channel), 0

    def turn(self, place: int, tokens: int) -> tuple[float, lane_pb2.Usage]:
        """(seconds to the first token, usage) of a prompt that is the walk's stretch there."""
        self._asked += 1
        prompt = self._walk.stretch(place, tokens)
        request = lane_pb2.GenerateRequest(
            request_id=f"turn-{self._asked}", prompt_ids=prompt, max_tokens=ANSWER_TOKENS
        )
        ids, first_ns = [], 0
        began_ns = time.monotonic_ns()
        for event in self._stub.Generate(request, timeout=LIMIT_S):
            for token in event.tokens.tokens if event.HasField("tokens") else ():
                first_ns = first_ns or token.stamp_ns
                ids.append(token.id)
        finished = event.finished
        if finished.error_code:
            raise StartFailed(f"{finished.error_code}: {finished.error_message}")
        if ids != self._walk.stretch(place + tokens, ANSWER_TOKENS):
            raise StartFailed("an answer is not the walk")
        return (first_ns - began_ns) / 1e9, finished.usage

    def counters(self) -> lane_pb2.Counters:
        """As they are now."""
        status: lane_pb2.LaneStatus = next(iter(self._stub.Watch(lane_pb2.WatchRequest(), timeout=LIMIT_S)))
        return status.counters

    def settle(self) -> None:
        """Until the lane has parked nothing new for half a second."""
        end_s, last, since_s = time.monotonic() + PARKED_WITHIN_S, -1, 0.0
        while time.monotonic() < end_s:
            parked = self.counters().park_bytes
            if parked != last:
                last, since_s = parked, time.monotonic()
            elif time.monotonic() > since_s + 0.5:
                return
            time.sleep(0.02)


def origin(usage: lane_pb2.Usage, excess_tokens: int) -> str:
    """Where a conversation came from that somebody else's turn had moved from the seat."""
    if excess_tokens > BLOCK_TOKENS:
        return "read again"
    return "pool" if usage.restored_tokens else "memory"


def measured(synthetic: Synthetic, run: Path, chosen: argparse.Namespace, state_budget: str) -> Figures:
    """Of one lane."""
    context = chosen.tokens + (3 * chosen.repeats + 2) * (chosen.added + ANSWER_TOKENS)
    park = run / "park.sock"
    options = [
        "lanes", "--owner", str(run / "owner.sock"), "--pack", str(synthetic.folder), "--listen",
        f"unix:{run}/lane.sock", "--device", chosen.device, "--drafts", "0", "--vram-budget", chosen.vram_budget,
        "--context", str(context), "--state-budget", state_budget, "--park", str(park),
        *(("--prefill-chunk", str(chosen.prefill_chunk)) if chosen.prefill_chunk else ()),
        *(("--cores", chosen.cores) if chosen.cores else ()),
    ]  # fmt: skip
    long, short = 997, 997 * 50  # places of the walk
    seconds: dict[str, list[float]] = {name: [] for name in ROUND}
    origins: dict[str, list[float]] = {}
    read_again = shorts = 0
    with ExitStack() as stack:
        stack.enter_context(ParkServer(park, chosen.park))
        stack.enter_context(running(*options)).event("lane_ready")
        ask = Asker(synthetic, stack.enter_context(grpc.insecure_channel(f"unix:{run}/lane.sock")))
        tokens = chosen.tokens
        cold_s, _ = ask.turn(long, tokens)
        for _ in range(chosen.repeats):
            for name in ROUND:
                if name in ("other", "alone", "parked"):
                    if name == "parked":
                        ask.settle()
                    shorts += 1
                    took_s, _ = ask.turn(short + 997 * shorts, chosen.short)
                else:
                    ask.settle()
                    tokens += ANSWER_TOKENS + chosen.added
                    took_s, usage = ask.turn(long, tokens)
                    # The last token of an answer was never read.
                    excess = tokens - usage.cached_tokens - chosen.added - 1
                    read_again = max(read_again, excess)
                    if name == "returned":
                        origins.setdefault(origin(usage, excess), []).append(took_s)
                    if name == "stayed" and (usage.restored_tokens or excess > BLOCK_TOKENS):
                        raise StartFailed("what was in the seat did not come from there")
                seconds[name].append(took_s)
        counted = ask.counters()
    found = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "state_budget": state_budget,
        "first_token_s": {"cold": round(cold_s, 4), **{name: round(each, 4) for name, each in found.items()}},
        "return_costs_s": round(found["returned"] - found["stayed"], 4),
        "returned_from": {
            name: {"returns": len(each), "first_token_s": round(statistics.median(each), 4)}
            for name, each in origins.items()
        },
        "leaving_costs_others_s": round(found["other"] - found["alone"], 4),
        "unparked_costs_others_s": round(found["other"] - found["parked"], 4),
        "first_tokens_s": {name: [round(each, 4) for each in all_of] for name, all_of in seconds.items()},
        "read_again_tokens_max": read_again,
        "park_ms_each": round(counted.park_ns / 1e6 / max(1, counted.parks), 2),
        "restore_ms_each": round(counted.restore_ns / 1e6 / max(1, counted.restores), 2),
        "parks": counted.parks, "restores": counted.restores, "restores_refused": counted.restores_refused,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.returning", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--scale", choices=sorted(SHAPES), default="true")
    add("--device", type=asked.device, choices=["cuda", "cpu"], default="cpu")
    add("--vram-budget", type=asked.size, default="16GiB", metavar="SIZE", help="of the lane (default: %(default)s)")
    add("--prefill-chunk", type=int, metavar="ROWS", help="of the lane (default: its own)")
    add("--cores", type=asked.cores, metavar="LIST", help="of the lane, for example 0-15 (default: all)")
    add("--tokens", type=int, default=25_000, help="of the long conversation (default: %(default)s)")
    add("--added", type=int, default=16, help="tokens that its turns add (default: %(default)s)")
    add("--short", type=int, default=64, help="tokens of the others (default: %(default)s)")
    add(
        "--state-budget",
        type=asked.size,
        action="append",
        metavar="SIZE",
        help="of a lane; each is measured by a lane of its own (default: 64MiB)",
    )
    add("--park", type=int, default=8 << 30, help="bytes of the pool (default: 8 GiB)")
    add("--repeats", type=int, default=3, help="of each return (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="that make the model (default: all)")
    add("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with made(folder / "pack", SHAPES[options.scale], threads=options.threads) as synthetic:
            run = run_directory(folder / "run")
            with synthetic.lend(run / "owner.sock"):
                lanes = [measured(synthetic, run, options, each) for each in options.state_budget or ["64MiB"]]
            result = frame(
                "bench.returning", [word for word in (sys.argv[1:] if argv is None else argv) if "/" not in word],
                pack=described(synthetic),
                conditions={"device": options.device, "tokens": options.tokens, "added_tokens": options.added,
                            "short_tokens": options.short, "repeats": options.repeats, "cpu_count": os.cpu_count()},
                packages=("torch", "grpcio", "xxhash"),
            )  # fmt: skip
    write({**result, "lanes": lanes}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
