"""The truth for penalties and sampler: the definitions of docs/sampling.md one after the other, in plain Python.

Everything is O(V log V) and says what it means; nothing is shared with lanes but the request's types.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lanes.request import Request, Sampling

GREATEST = float(np.finfo(np.float32).max)


def fp32(value: float) -> float:
    """Rounded to fp32, and kept finite."""
    return float(np.float32(min(max(value, -GREATEST), GREATEST)))


def naive_row(logits: Sequence[float], request: Request, output: Sequence[int]) -> list[float]:
    """What is drawn from after `output` (replayed tokens among it)."""
    sampling = request.sampling
    prompt = request.prompt_ids[: len(request.prompt_ids) - request.replayed_tokens]
    times = Counter(output)
    row = [float(value) for value in logits]
    for token, bias in sampling.logit_bias:
        row[token] = fp32(row[token] + bias)
    for token in {*prompt, *output}:
        value, factor = row[token], sampling.repetition_penalty
        row[token] = fp32(value / factor if value > 0 else value * factor)
    for token, count in times.items():
        row[token] = fp32(row[token] - (sampling.frequency_penalty * count + sampling.presence_penalty))
    if len(output) < sampling.min_tokens:
        for token in request.stop_ids:
            row[token] = -math.inf
    return row


def naive_distribution(row: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Probabilities of the ids that are kept; the lowest id wins a tie."""
    order = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    if sampling.top_k:
        order = order[: sampling.top_k]
    highest = float(row[order[0]])
    weight = {token: math.exp((float(row[token]) - highest) / sampling.temperature) for token in order}
    goal, reached, kept = sampling.top_p * math.fsum(weight.values()), 0.0, []
    for token in order:
        kept.append(token)
        reached += weight[token]
        if reached >= goal:
            break
    kept = [token for token in kept if weight[token] >= sampling.min_p and weight[token] > 0]
    total = math.fsum(weight[token] for token in kept)
    return {token: weight[token] / total for token in kept}
