"""`python -m deploy.demo_model.routing PACK DATA`: which experts the model uses, and what a cache makes of it.

An owner and a lane serve held-out text (prompts of code and prose, sampled answers) and the lane writes its routing
trace. From the trace: the share of accesses that the hottest tenth of (layer, expert) pairs gets, and the hit rates of
least recently used and of the lane's own policy at several sizes of cache. Not here: policies (`bench.cache_policy`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np

from bench.cache_baselines import least_recently_used
from bench.cache_policy import UNLIMITED, Replay, recorded, run
from bench.second_lane import READY_LIMIT_S, StartFailed, running
from deploy.demo_model.data import tokens
from laneproto.v1 import lane_pb2, lane_pb2_grpc
from lanes.experts.adaptive import adaptive
from shared_experts.pack import Pack

SHARES = (0.1, 0.2, 0.4)
HOT_SHARE = 0.1


def record(
    pack: Path, data: Path, out: Path, requests: int, prompt_tokens: int, answer_tokens: int, drafts: int
) -> None:
    """Lets a lane answer `requests` held-out prompts, code and prose in turn, and write the trace `out`."""
    streams = [tokens.read(data / f"{kind}{tokens.SUFFIX}") for kind in ("code", "prose")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir(mode=0o700)
        lane = (
            "lanes", "--owner", str(folder / "owner.sock"), "--pack", str(pack), "--listen",
            f"unix:{folder}/lane-0.sock", "--trace-routing", str(out.absolute()), "--vram-budget", "2MiB",
            "--drafts", str(drafts),
        )  # fmt: skip
        with running("shared_experts", "own", "--pack", str(pack), "--run-dir", str(folder)) as owner:
            owner.event("owner_ready")
            with running(*lane) as child:
                child.event("lane_ready")
                with grpc.insecure_channel(f"unix:{folder}/lane-0.sock") as channel:
                    stub = lane_pb2_grpc.LaneStub(channel)
                    for number in range(requests):
                        stream = streams[number % len(streams)]
                        first = number * (stream.shape[0] - prompt_tokens) // requests
                        ask(stub, number, stream[first : first + prompt_tokens].tolist(), answer_tokens)


def ask(stub: lane_pb2_grpc.LaneStub, number: int, ids: list[int], answer_tokens: int) -> None:
    """One request, waited for."""
    request = lane_pb2.GenerateRequest(
        request_id=f"r{number}",
        prompt_ids=ids,
        max_tokens=answer_tokens,
        sampling=lane_pb2.Sampling(temperature=0.8, seed=number),
    )
    finished = list(stub.Generate(request, timeout=READY_LIMIT_S))[-1].finished
    if finished.error_code:
        raise StartFailed(f"{finished.error_code}: {finished.error_message}")


def figures(replay: Replay) -> dict[str, object]:
    """Skew and hit rates of a trace."""
    uses = np.zeros(replay.keys, np.int64)
    for number, window in enumerate(replay.windows):
        if replay.is_decode(number):
            np.add.at(uses, window.keys, window.rows)
    hottest = np.sort(uses)[::-1]
    result: dict[str, object] = {
        "decode_windows": sum(map(replay.is_decode, range(len(replay.windows)))),
        "keys": replay.keys,
        "hottest_tenth_share": round(float(hottest[: int(HOT_SHARE * replay.keys)].sum() / hottest.sum()), 4),
    }
    for share in SHARES:
        slots = int(share * replay.keys)
        result[f"{share:.0%}"] = {
            "lru": run(replay, least_recently_used, slots, UNLIMITED)["hit_rate"],
            "adaptive": run(replay, adaptive, slots, UNLIMITED)["hit_rate"],
        }
    return result


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.demo_model.routing", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=192)
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the lane guesses ahead (default: 0)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace"
        asked = (options.requests, options.prompt_tokens, options.answer_tokens, options.drafts)
        record(options.pack, options.data, trace, *asked)
        with Pack.open(options.pack) as pack:
            config = pack.manifest.config
        replay = recorded(trace)
        if not options.drafts:  # then the draft layer's experts, the last ones, take no part
            keys = int(str(config["num_hidden_layers"])) * int(str(config["num_experts"]))
            replay = replace(replay, keys=keys)
        text = json.dumps({"drafts": options.drafts, **figures(replay)}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
