"""What is equal within the pack's tolerance: other cuts of the same tokens, and the lane on the CPU.

A case says how far apart logits are, of each row's greatest one, and raises Apart over the tolerance (near_tie). The
lane on the CPU computes in fp32; "in the GPU's types" it rounds what a GPU rounds: only orders of sums differ then. How
far that rounding alone moves a row is the pack's affair, and allowed on top where the lane in fp32 is compared with.
Not here: what is equal to the bit (exactness_cases), guesses (exactness_guesses), the tolerance (lanes.tolerance).
"""

from __future__ import annotations

import torch

from bench.exactness_cases import TRIALS, Case, Ground, close, trials
from bench.gpu_lane_rig import types_of
from bench.near_tie import apart, tolerance

MIXED = (3, 1, 2, 4, 4, 1, 3)  # rows of windows


def sizes(ground: Ground) -> str:
    """Windows of two, three and four rows against single ones."""
    lane = ground.lane()
    want = ground.said(lane)
    got = torch.cat([ground.said(lane, [rows]) for rows in (2, 3, 4)])
    return apart(got, want.repeat(3, 1), tolerance(ground.pack))


def drafted(ground: Ground) -> str:
    """Trial windows of every length and outcome against single rows."""
    lane = ground.lane()
    want, got = ground.said(lane), []
    for rows, right in TRIALS:
        got.append(trials(lane, ground, rows, right, 0, wrong=True)[0])
    return apart(torch.cat(got), torch.cat([want[: len(each)] for each in got]), tolerance(ground.pack))


def chunks(ground: Ground) -> str:
    """A prompt in chunks of other sizes, then single rows."""
    lane, got = ground.lane(), []
    want = ground.said(lane)
    for rows in (ground.prompt // 2, ground.prompt // 3, 64, 17):
        slot = lane.states.open(ground.context_tokens)
        lane.windows(ground.ids[: ground.prompt], slot, [rows], logits="none")
        got.append(lane.windows(ground.rest, slot, [1]))
        close(lane, slot)
    return apart(torch.cat(got), want.repeat(len(got), 1), tolerance(ground.pack))


def against_the_cpu(ground: Ground) -> str:
    """The lane on the CPU, every window size; beyond what rounding as a GPU does moves that lane itself."""
    dtype, rounded = types_of(ground.pack, ground.device), None
    if dtype is not None and dtype != torch.float32:
        rounded = ground.said(ground.cpu(dtype=dtype), MIXED)
    got, want = ground.said(ground.lane(), MIXED), ground.said(ground.cpu(), MIXED)
    return apart(got, want, tolerance(ground.pack), rounded)


def in_its_types(ground: Ground) -> str:
    """The lane on the CPU with matrices, keys and values of the pack's type."""
    dtype = types_of(ground.pack, ground.device)
    return apart(ground.said(ground.lane(), MIXED), ground.said(ground.cpu(dtype=dtype), MIXED), tolerance(ground.pack))


MARGINS: dict[str, Case] = {
    "windows of 1 to 4 rows": sizes,
    "drafts on and off": drafted,
    "chunk sizes": chunks,
    "lane on the CPU": against_the_cpu,
    "the same in the GPU's types": in_its_types,
}
