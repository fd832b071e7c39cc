"""The naive twins of the kernels: the same arguments, plain numpy and torch, one row after another.

Each is the truth that its kernel is tested against, and is itself what a CPU lane computes today: where the lane has a
function for it, the twin calls that. Not here: speed. Needs no triton.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from lanes.experts import reference
from lanes.experts.split import split
from lanes.models.qwen4_exp import moe
from shared_experts.layout import RecordLayout


def experts(
    layout: RecordLayout, addresses: torch.Tensor, expert: torch.Tensor, pairs: torch.Tensor, x: torch.Tensor,
    y: torch.Tensor,
) -> None:  # fmt: skip
    """y[p] = expert applied to x[row], of every pair of the jobs (lanes.kernels.experts); host memory only."""
    for job, id in enumerate(expert.tolist()):
        if id < 0:
            continue
        record = ctypes.string_at(int(addresses[id]), layout.record_bytes)
        for row, pair in enumerate(pairs[job].tolist()):
            if pair >= 0:
                y[pair] = torch.from_numpy(reference.expert(layout, record, x[row].numpy()))


def combine(weights: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = fma over k ascending of weights[r, k] * y[r * K + k], from +0."""
    rows, chosen = weights.shape
    for r in range(rows):
        picked = np.ascontiguousarray(y[r * chosen : (r + 1) * chosen].numpy())
        out[r] = torch.from_numpy(reference.combine(weights[r].numpy(), picked))


def route(
    logits: torch.Tensor, resident: torch.Tensor, cpu_of_misses: torch.Tensor, uses: torch.Tensor, chosen: int,
    *, normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(ids, weights, job experts, job pairs, slots) as lanes.kernels.route fills them; `uses` is changed in place."""
    rows = len(logits)
    ids, weights = moe.route(logits[:, : len(resident)], chosen, normalise)
    flat = ids.reshape(-1).tolist()
    part = split(ids.numpy().astype(np.int32), resident.numpy() != 0, cpu_of_misses.numpy())
    expert = torch.full((len(flat),), -1, dtype=torch.int32)
    pairs = torch.full((len(flat), rows), -1, dtype=torch.int32)
    ours = sorted(set(flat) - set(part.taken.tolist()))
    for job, id in enumerate(ours):
        expert[job] = id
        for pair in (p for p, e in enumerate(flat) if e == id):
            pairs[job, pair // chosen] = pair
    for id in flat:
        uses[id] += 1
    return ids, weights, expert, pairs, torch.from_numpy(part.slots)
