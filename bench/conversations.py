"""Multi-turn agent traces against real lanes: what is read again, time to the first token of a turn, parking, moving.

A root (system prompt and tools) that all conversations of a run share; each turn adds a tool result; every third turn a
sub-agent with the same root asks something of its own. 1, 2, 4 and 8 conversations take turns on one lane whose memory
holds about three; then conversations that change lanes at every turn, and the same ones that stay.

    python -m bench.conversations                                   two lanes on CPUs, a small pack
    python -m bench.conversations --device cuda --scale true --cores 0-7 --cores 8-15    two on one GPU, synthetic

`park_ms_each` is `park_ns` by `parks` of `counters`: how long the lane's own thread was at it for each conversation
that was parked, however large (`park_bytes` has what went out: a first one is whole, later ones add their new pages),
not what copies and digests took beside. What the first one finds to be done once, connecting and pinning, is in it, and
what was begun and given up. `restore_ms_each` is `restore_ns` by `restores`, likewise.

Not here: the coordinator (lanes are asked directly). Invariant: prompts depend on the seed alone; answers are greedy
and drafts are off, so two runs of a trace can be compared to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.checkpoint import PRESETS, write_checkpoint
from bench.result import frame, write
from bench.second_lane import StartFailed, running
from bench.synthetic.__main__ import described
from bench.synthetic.pack import Synthetic, made
from bench.synthetic.shape import SHAPES
from laneproto.v1 import lane_pb2, lane_pb2_grpc
from shared_experts.owner import run_directory
from shared_experts.park_server import ParkServer

ANSWER_TOKENS = 8
COUNTS = (1, 2, 4, 8)
LIMIT_S = 3600.0
SETTLE_S, QUIET_S = 60.0, 0.2
VOCABULARY = 500  # ids below the special ones of every preset


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost."""

    number: int
    new_tokens: int  # that no lane can know: what was added, and the last token of the answer before
    read_tokens: int
    restored_tokens: int
    first_token_s: float
    answer: tuple[int, ...]
    logprobs: bytes


class Lane:
    """A lane process, asked directly."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = lane_pb2_grpc.LaneStub(self._channel)

    def ask(self, prompt: list[int], boundary: int, salt: bytes) -> tuple[float, list[lane_pb2.Token], lane_pb2.Usage]:
        """(seconds to the first token, tokens, usage)."""
        request = lane_pb2.GenerateRequest(
            request_id="turn", prompt_ids=prompt, max_tokens=ANSWER_TOKENS, logprobs=True, tenant_salt=salt,
            checkpoint_positions=[boundary],
        )  # fmt: skip
        began_s, first_s, tokens = time.monotonic(), 0.0, []
        for event in self._stub.Generate(request, timeout=LIMIT_S):
            if event.HasField("tokens"):
                first_s = first_s or time.monotonic() - began_s
                tokens += event.tokens.tokens
            elif event.HasField("finished"):
                if event.finished.error_code:
                    raise StartFailed(f"{event.finished.error_code}: {event.finished.error_message}")
                return first_s, tokens, event.finished.usage
        raise RuntimeError("a stream without an end")

    def counters(self) -> lane_pb2.Counters:
        """As they are now."""
        status: lane_pb2.LaneStatus = next(iter(self._stub.Watch(lane_pb2.WatchRequest(), timeout=LIMIT_S)))
        return status.counters

    def settle(self, parks: int) -> None:
        """Until so many conversations were parked and nothing more is: the lane is idle then. Not for ever."""
        end_s, last, since_s = time.monotonic() + SETTLE_S, -1, 0.0
        while (now_s := time.monotonic()) < end_s:
            counted = self.counters()
            if counted.park_bytes != last:
                last, since_s = counted.park_bytes, now_s
            elif counted.parks >= parks and now_s > since_s + QUIET_S:
                return
            time.sleep(0.02)


class Conversation:
    """One agent's side: it keeps the whole text and sends it again."""

    def __init__(self, root: list[int], seed: int, salt: bytes) -> None:
        self._ids, self._random, self._salt = list(root), random.Random(seed), salt  # noqa: S311  a trace, no secret
        self._boundary, self.turns = len(root), 0

    def turn(self, lane: Lane, added: int) -> Turn:
        """Adds a tool result of that many tokens and asks."""
        self._ids += [self._random.randrange(VOCABULARY) for _ in range(added)]
        first_s, tokens, usage = lane.ask(self._ids, self._boundary, self._salt)
        read = usage.prompt_tokens - usage.cached_tokens
        new = added + 1 if self.turns else usage.prompt_tokens
        self._ids += [token.id for token in tokens]
        self.turns += 1
        for token in tokens:
            token.ClearField("stamp_ns")
        said = b"".join(token.SerializeToString(deterministic=True) for token in tokens)
        answer = tuple(token.id for token in tokens)
        return Turn(self.turns, new, read, usage.restored_tokens, first_s, answer, said)


def taking_turns(lane: Lane, root: list[int], count: int, turns: int, added: int) -> dict[str, object]:
    """`count` conversations, one turn after the other, and their sub-agents."""
    salt = f"run {count}".encode()
    talks = [Conversation(root, 1000 * count + number, salt) for number in range(count)]
    before, seen, agents = lane.counters(), [], []
    for turn in range(turns):
        for number, talk in enumerate(talks):
            seen.append(talk.turn(lane, added))
            if turn % 3 == 2:
                agents.append(Conversation(root, 7000 * count + 10 * turn + number, salt).turn(lane, added))
    after = lane.counters()
    read = sum(turn.read_tokens for turn in seen + agents)
    later = [turn for turn in seen if turn.number > 1]
    counted = {name: getattr(after, name) - getattr(before, name) for name in (
        "parks", "park_bytes", "park_ns", "restores", "restore_ns", "restores_refused", "reused_tokens", "checkpoints",
    )}  # fmt: skip
    return {
        "conversations": count,
        "turns": len(seen),
        "prompt_tokens_last": len(talks[0]._ids) - ANSWER_TOKENS,
        "read_again_tokens_max": max(turn.read_tokens - turn.new_tokens for turn in later),
        "read_share_of_prompts": round(read / (read + counted["reused_tokens"]), 4),
        "first_token_s": {
            "cold": round(seen[0].first_token_s, 3),
            "first_turn_of_the_others": _median(t.first_token_s for t in seen[1:count]),
            "later_turns": _median(t.first_token_s for t in later),
            "later_turns_restored": _median(t.first_token_s for t in later if t.restored_tokens),
            "sub_agents": _median(t.first_token_s for t in agents),
        },
        "park_ms_each": round(counted["park_ns"] / 1e6 / max(1, counted["parks"]), 2),
        "restore_ms_each": round(counted["restore_ns"] / 1e6 / max(1, counted["restores"]), 2),
        "counters": counted,
        "state_used_bytes": after.state_used_bytes,
        "state_budget_bytes": after.state_budget_bytes,
    }


def moving(lanes: Sequence[Lane], root: list[int], turns: int, added: int) -> dict[str, object]:
    """Two conversations that change lanes at every turn, against the same two that stay."""
    equal, read_again, moved_s, stayed_s = True, 0, [], []
    for number in range(2):
        wanderer, stayer = (Conversation(root, number, salt) for salt in (b"moves", b"stays"))
        for turn in range(turns):
            parks = [lane.counters().parks for lane in lanes]
            moved = wanderer.turn(lanes[turn % 2], added)
            stayed = stayer.turn(lanes[0], added)
            equal &= moved.logprobs == stayed.logprobs
            if turn:
                read_again = max(read_again, moved.read_tokens - moved.new_tokens)
                moved_s.append(moved.first_token_s)
                stayed_s.append(stayed.first_token_s)
            lanes[turn % 2].settle(parks[turn % 2] + (1 if turn % 2 else 2))  # the stayer, too, where it is
    return {
        "cross_lane_resume_equal": equal,
        "read_again_tokens_max": read_again,
        "first_token_s": {"moved": _median(moved_s), "stayed": _median(stayed_s)},
    }


def _median(values: Iterator[float] | Sequence[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


def make_pack(folder: Path, preset: str) -> Path:
    """A small random model with f32 experts."""
    write_checkpoint(folder / "checkpoint", PRESETS[preset], 0, tokenizer=False)
    command = [sys.executable, "-m", "shared_experts", "pack", str(folder / "checkpoint"), str(folder / "pack")]
    subprocess.run([*command, "--experts", "f32"], check=True, stdout=sys.stderr)
    return folder / "pack"


def on_cpus(folder: Path, run: Path, options: argparse.Namespace) -> dict[str, object]:
    """All figures of lanes on CPUs, with an owner of their own."""
    pack = make_pack(folder, options.preset)
    with contextlib.ExitStack() as stack:
        owner = ("shared_experts", "own", "--pack", str(pack), "--run-dir", str(run), "--park", str(options.park))
        stack.enter_context(running(*owner)).event("owner_ready")
        return measured(_lanes(stack, pack, run, options, "--vram-budget", "16MiB"), options)


def on_gpu(synthetic: Synthetic, run: Path, options: argparse.Namespace) -> dict[str, object]:
    """All figures of lanes that share a GPU, this process being the owner."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(synthetic.lend(run / "owner.sock"))
        stack.enter_context(ParkServer(run / "park.sock", options.park))
        vram = ["--device", options.device, "--vram-budget", options.vram_budget]
        if options.prefill_chunk:
            vram += ["--prefill-chunk", str(options.prefill_chunk)]
        return measured(_lanes(stack, synthetic.folder, run, options, *vram), options)


def _lanes(stack: contextlib.ExitStack, pack: Path, run: Path, options: argparse.Namespace, *more: str) -> list[Lane]:
    """Two, started side by side."""
    started = []
    for number in range(2):
        cores = ("--cores", options.cores[number]) if options.cores else ()
        command = (
            "lanes", "--owner", str(run / "owner.sock"), "--pack", str(pack), "--listen", _address(run, number),
            "--name", f"lane-{number}", "--context", str(options.context), "--drafts", "0", "--state-budget",
            str(options.state_budget), "--park", str(run / "park.sock"), *cores, *more,
        )  # fmt: skip
        started.append(stack.enter_context(running(*command)))
    for lane in started:
        lane.event("lane_ready")
    return [Lane(_address(run, number)) for number in range(2)]


def _address(run: Path, number: int) -> str:
    return f"unix:{run}/lane-{number}.sock"


def measured(lanes: Sequence[Lane], options: argparse.Namespace) -> dict[str, object]:
    """All figures."""
    generator = random.Random(1)  # noqa: S311  a trace, no secret
    root = [generator.randrange(VOCABULARY) for _ in range(options.root)]
    per_lane = [taking_turns(lanes[0], root, count, options.turns, options.added) for count in options.counts]
    moved = moving(lanes, root, options.turns, options.added)
    excess = max(
        *(int(str(one["read_again_tokens_max"])) for one in per_lane), int(str(moved["read_again_tokens_max"]))
    )
    return {
        "reread_excess_tokens_max": excess,
        "cross_lane_resume_equal": moved["cross_lane_resume_equal"],
        "per_lane": per_lane,
        "moving": moved,
    }


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.conversations", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="tiny", help="the model on CPUs (default: tiny)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--scale", choices=sorted(SHAPES), help="a synthetic model, whose owner is this process; what a GPU needs")
    add("--vram-budget", default="16GiB", help="of a lane of a synthetic model (default: 16GiB)")
    add("--prefill-chunk", type=int, help="of a lane of a synthetic model, in tokens (default: the lane's)")
    add("--cores", action="append", help="of a lane, once for each (default: all that there are, for both)")
    add("--counts", type=int, nargs="+", default=COUNTS, help="of conversations on a lane (default: 1 2 4 8)")
    add("--root", type=int, default=25_000, help="tokens of system prompt and tools (default: 25000)")
    add("--turns", type=int, default=6, help="of each conversation (default: 6)")
    add("--added", type=int, default=300, help="tokens that a turn adds (default: 300)")
    add("--context", type=int, default=32_768, help="of a lane, in tokens (default: 32768)")
    add("--state-budget", type=int, default=256 << 20, help="of a lane, in bytes (default: 256 MiB)")
    add("--park", type=int, default=1 << 30, help="size of the pool in bytes (default: 1 GiB)")
    add("--out", type=Path, help="also write the object to this file")
    options = parser.parse_args(argv)
    if options.device == "cuda" and options.scale is None:
        parser.error("--device cuda needs --scale: a GPU serves none of the presets")
    if options.cores and len(options.cores) != 2:
        parser.error("--cores must be given for both lanes")
    return options


def conditions(options: argparse.Namespace) -> dict[str, object]:
    """Under which the figures were measured."""
    return {
        "root_tokens": options.root, "turns": options.turns, "added_tokens": options.added,
        "answer_tokens": ANSWER_TOKENS, "device": options.device, "lanes": "two processes, drafts off",
        "cores": options.cores, "prefill_chunk": options.prefill_chunk, "cpus": os.cpu_count(),
        "state_budget_bytes": options.state_budget,
        "park_bytes": options.park,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints one JSON object; exit code 1 when a turn reads over a block again, or moving changes a bit."""
    options = parsed(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = run_directory(folder / "run")
        if options.scale is None:
            figures = on_cpus(folder, run, options)
            pack: dict[str, object] = {"preset": options.preset, "experts": "f32", "values": "random"}
        else:
            with made(folder / "pack", SHAPES[options.scale], threads=os.cpu_count() or 1) as synthetic:
                figures, pack = on_gpu(synthetic, run, options), described(synthetic)
    given = list(argv if argv is not None else sys.argv[1:])
    words = [word for word in given if not word.startswith("/")]
    packages = ("torch", "grpcio", "xxhash")
    result = frame("bench.conversations", words, pack=pack, conditions=conditions(options), packages=packages)
    write({**result, **figures}, options.out)
    return 0 if figures["cross_lane_resume_equal"] and int(str(figures["reread_excess_tokens_max"])) <= 64 else 1


if __name__ == "__main__":
    sys.exit(main())
