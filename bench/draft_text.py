"""What a pack's own draft layer brings on a CPU lane, over held-out text: tokens a pass and the gain in time.

Two lanes on one region, one with drafts and one without, answer the same prompts greedily, in turns. An answer of a
small model soon repeats itself, and repetition is easy to guess: `accepted` of `deploy.demo_model.evaluate`, after
true tokens, is the stricter figure.

    python -m bench.draft_text deploy/demo_model/pack code=code.u16.xz prose=prose.u16.xz --out FILE
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.own_lane import OwnLane, started
from bench.result import frame, write
from bench.second_lane import running
from bench.token_file import read_token_file


def prompts(path: Path, count: int, tokens: int) -> list[list[int]]:
    """`count` stretches of a stream of uint16 ids, .xz or plain, spread evenly."""
    stream = read_token_file(path)
    starts = np.linspace(0, len(stream) - tokens, count).astype(int)
    return [stream[start : start + tokens].tolist() for start in starts]


def compare(alone: OwnLane, drafting: OwnLane, asked: Sequence[Sequence[int]], tokens: int) -> dict[str, object]:
    """Both lanes over the same prompts."""
    gains, passes, equal, proposed, accepted = [], [], 0, 0, 0
    for number, prompt in enumerate(asked):
        first, second = (alone, drafting) if number % 2 else (drafting, alone)
        answers = {lane: lane.ask(prompt, tokens) for lane in (first, second)}
        plain, fast = answers[alone], answers[drafting]
        gains.append(fast.tokens_per_s / plain.tokens_per_s)
        passes.append((tokens - 1) / fast.decode.decode_windows)
        equal += plain.ids == fast.ids
        proposed += fast.decode.draft_tokens
        accepted += fast.decode.right_draft_tokens
    return {
        "prompts": len(asked),
        "tokens_per_pass": round(statistics.mean(passes), 3),
        "gain": round(statistics.median(gains), 3),
        "gains": [round(gain, 3) for gain in gains],
        "drafts_accepted": round(accepted / max(1, proposed), 3),
        "drafts_proposed": proposed,
        "answers_equal": equal,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.draft_text", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE", help="held-out ids, uint16, .xz or plain")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--vram-budget", default="4MiB")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result = frame(
        "bench.draft_text", [str(asked.pack), *asked.texts, "--drafts", str(asked.drafts)],
        pack={"path": asked.pack.name, "cache": asked.vram_budget},
        conditions={
            "prompt_tokens": asked.prompt_tokens, "answer_tokens": asked.answer_tokens, "temperature": 0,
            "lanes": "two in one process, in turns",
        },
        packages=("torch", "numpy"),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        run.mkdir(mode=0o700)
        owner = stack.enter_context(running("shared_experts", "own", "--pack", str(asked.pack), "--run-dir", str(run)))
        owner.event("owner_ready")

        def lane(name: str, drafts: int) -> OwnLane:
            options = ["--owner", str(run / "owner.sock"), "--pack", str(asked.pack), "--name", name]
            options += ["--listen", f"unix:{run}/{name}.sock", "--vram-budget", asked.vram_budget]
            return stack.enter_context(started([*options, "--drafts", str(drafts)]))

        alone, drafting = lane("alone", 0), lane("drafting", asked.drafts)
        found = {}
        for text in asked.texts:
            name, _, path = text.partition("=")
            found[name] = compare(
                alone, drafting, prompts(Path(path), asked.prompts, asked.prompt_tokens), asked.answer_tokens
            )
            print(name, found[name], flush=True)
    write({**result, "texts": found}, asked.out)


if __name__ == "__main__":
    main()
