"""How far a replay moves an answer: `python -m bench.replay PACK [--prompts 20] [--cuts 4]`.

A lane answers prompts greedily; then, as after a lane's death, it gets prompt and the first tokens of the answer under
another tenant's salt, so that nothing is remembered, and goes on. Not here: deaths and the coordinator (failover). What
is compared: how far the log-probabilities of the same tokens are apart, and, where the two answers part, how far
the two likeliest tokens were apart at that place: a replay may only part where that is no more than replays move.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from bench import result
from bench.second_lane import lane, running
from laneproto.v1 import lane_pb2, lane_pb2_grpc

VOCABULARY = 500  # ids below the special ones of every preset


@dataclass(frozen=True, slots=True)
class Parted:
    """Where a replay went another way."""

    place: int  # of the answer's tokens
    margin: float  # between the two likeliest tokens of the undisturbed answer there
    moved_there: float  # that margin and the replay's, which is the other way round; infinite: other tokens stand there
    moved_before: float  # the farthest that any log-probability before it moved


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay against its answer."""

    moved: float
    parted: Parted | None


def compare(answer: list[lane_pb2.Token], cut: int, rest: list[lane_pb2.Token]) -> Replayed:
    """`rest`: what came after the first `cut` tokens were replayed."""
    moved = 0.0
    for place, (ours, theirs) in enumerate(zip(answer[cut:], rest, strict=True), cut):
        if ours.id != theirs.id:
            margin, other = (each.top[0].logprob - each.top[1].logprob for each in (ours, theirs))
            same_two = {each.id for each in ours.top} == {each.id for each in theirs.top}
            return Replayed(moved, Parted(place, margin, margin + other if same_two else math.inf, moved))
        moved = max(moved, abs(ours.logprob - theirs.logprob))
    return Replayed(moved, None)


class Asker:
    """One lane, asked directly."""

    def __init__(self, address: str, max_tokens: int) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = lane_pb2_grpc.LaneStub(self._channel)
        self._max_tokens, self._asked = max_tokens, 0

    def ask(self, prompt: list[int], emitted: list[int]) -> list[lane_pb2.Token]:
        """The tokens after those that were emitted; nothing that was asked before is remembered."""
        self._asked += 1
        request = lane_pb2.GenerateRequest(
            request_id=f"replay-{self._asked}", prompt_ids=[*prompt, *emitted], max_tokens=self._max_tokens,
            replayed_tokens=len(emitted), logprobs=True, top_logprobs=2, tenant_salt=self._asked.to_bytes(8, "big"),
        )  # fmt: skip
        tokens: list[lane_pb2.Token] = []
        for event in self._stub.Generate(request, timeout=600):
            tokens += event.tokens.tokens
        return tokens


def measure(asker: Asker, prompts: int, cuts: int, max_tokens: int) -> list[Replayed]:
    """All replays of all prompts."""
    chance = random.Random(0)  # noqa: S311  prompts, nothing secret
    found = []
    for _ in range(prompts):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(4, 40))]
        answer = asker.ask(prompt, [])
        for _ in range(cuts):
            cut = chance.randrange(1, max_tokens)
            found.append(compare(answer, cut, asker.ask(prompt, [token.id for token in answer[:cut]])))
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exw-", dir="/tmp")))
        owner = ("shared_experts", "own", "--pack", str(options.pack), "--run-dir", str(run))
        stack.enter_context(running(*owner)).event("owner_ready")
        stack.enter_context(lane(run, options.pack, 0)).event("lane_ready")
        asker = Asker(f"unix:{run}/lane-0.sock", options.max_tokens)
        found = measure(asker, options.prompts, options.cuts, options.max_tokens)
    parted = [each.parted for each in found if each.parted]
    framed = result.frame(
        "bench.replay", ["PACK", *(word for word in sys.argv[1:] if "/" not in word and word != "--out")],
        pack={"name": options.pack.name}, packages=("expressway", "torch"),
        conditions={"max_tokens": options.max_tokens, "device": "cpu", "greedy": True},
    )  # fmt: skip
    moved = sorted(each.moved for each in found)
    measured = {
        "replays": len(found),
        "moved": {"median": statistics.median(moved), "most": moved[-1]},
        "parted": [asdict(each) for each in parted],
    }
    result.write({**framed, **measured}, options.out)


if __name__ == "__main__":
    main()
