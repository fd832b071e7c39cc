"""Compiles every kernel that a GPU lane (sm_90) launches for a pack, without a GPU.

Sizes that some kernel cannot take show here and not in a window.

    python -m bench.pack_code deploy/demo_model/pack --rows 1,2,3,4

The lane is made as for a GPU and told to run windows and a prompt; launches are compiled instead of run, so what it
computes means nothing. Not here: what the code is made of (kernel_code), whether it is right (exactness).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import kernel_code  # before what has kernels: it decides that they are compiled
from bench.gpu_lane_rig import gpu_lane
from lanes.models.qwen4_exp.gpu.model import GpuQwen4Exp
from lanes.models.qwen4_exp.gpu.prompt import use_kernels
from lanes.models.qwen4_exp.gpu.served import check_served
from shared_experts.pack import Pack

MORE_TOKENS = 70  # of a prompt, behind those that read everything before them


def launches(pack: Pack, windows: Sequence[int]) -> None:
    """All of a lane's: windows of so many rows with every part of theirs, a guess, a prompt."""
    info = pack.manifest.experts
    lane = gpu_lane(pack, capture=False, drafts=info.draft_layers > 0, dtype=torch.bfloat16, context_tokens=4096)
    model = lane.model
    assert isinstance(model, GpuQwen4Exp)
    check_served(model.spec, info, lane.context_tokens)
    kernel_code.grouped_of(info.layout, info.experts, model.spec.experts_per_token, 256)
    slot = lane.states.open(lane.context_tokens)
    for rows in windows:
        lane.windows(range(2, 2 + rows), slot, [rows])
    if info.draft_layers:
        model.guess(lane.states[slot], 2, 0, best=2)
    model.settle(lane.states[slot])
    use_kernels(model._inner, lane.context_tokens)
    lane.prompter = None
    tokens = min(model.spec.index_budget_tokens + MORE_TOKENS, lane.context_tokens)
    lane.begin([token % model.spec.vocab for token in range(tokens)])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object: the shared memory of each kernel by name; an exception where one does not compile."""
    parser = argparse.ArgumentParser(prog="python -m bench.pack_code", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--rows", default="1,2,3,4", help="of windows, comma-separated (default: %(default)s)")
    options = parser.parse_args(argv)

    def shared_bytes(kernel: Any) -> int:
        return int(kernel.metadata.shared)

    with Pack.open(options.pack) as pack:
        rows = [int(number) for number in options.rows.split(",")]
        found = kernel_code.compiled(lambda: launches(pack, rows), shared_bytes)
    sys.stdout.write(json.dumps({"target": "sm_90", "shared_bytes": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
