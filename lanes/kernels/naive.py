"""The naive twins of the kernels: the same arguments, plain numpy and torch, one row after another.

Each is the truth that its kernel is tested against, and is itself what a CPU lane computes today: where the lane has a
function for it, the twin calls that. Not here: speed. Needs no triton.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from lanes.experts import reference
from lanes.experts.split import split
from lanes.models.delta_rule import recurrent
from lanes.models.ops import causal_conv, rms, rotate, top_lowest
from lanes.models.qwen4_exp import moe
from lanes.models.qwen4_exp.deltanet import L2_EPS
from shared_experts.layout import RecordLayout

if TYPE_CHECKING:
    from lanes.kernels.attention import Angles, AttentionShape, Kept, Norms
    from lanes.kernels.deltanet import DeltaShape


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
    logits: torch.Tensor, resident: torch.Tensor, cpu_of_misses: torch.Tensor, chosen: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(ids, weights, job experts, job pairs, slots) as lanes.kernels.route fills them."""
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
    return ids, weights, expert, pairs, torch.from_numpy(part.slots)


def delta_window(
    shape: DeltaShape, qkv: torch.Tensor, ba: torch.Tensor, taps: torch.Tensor, rate: torch.Tensor,
    shift: torch.Tensor, tail: torch.Tensor, state: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One window as lanes.models.qwen4_exp.deltanet computes it: o [R, N, V]; tail and state advance in place."""
    rows, heads, key = qkv.shape[0], shape.key_heads, shape.key_dim
    columns = torch.cat((tail, qkv))
    mixed = F.silu(causal_conv(columns, taps.unbind()))
    tail.copy_(columns[rows:])
    keys, v = mixed.split((2 * heads * key, shape.value_heads * shape.value_dim), dim=1)
    keys = keys.reshape(rows, 2, heads, key)
    keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + L2_EPS)
    keys = keys.repeat_interleave(shape.value_heads // heads, dim=2)
    b, a = ba.chunk(2, dim=1)
    g = rate * F.softplus(a + shift)
    v = v.reshape(rows, shape.value_heads, shape.value_dim)
    return recurrent(state, keys[:, 0] * key**-0.5, keys[:, 1], v, g, b.sigmoid())


def ngram(
    x: torch.Tensor, key_value: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tail: torch.Tensor, taps: torch.Tensor, dilation: int, eps: float, least: float,
) -> torch.Tensor:  # fmt: skip
    """x fp32 [R, S, H] gains an n-gram layer's rows, in place; fp32 [R, S * H], the rows that its tail gains."""
    streams, hidden = x.shape[1:]
    key, value = key_value.split((streams * hidden, hidden), dim=1)
    key = rms(key.view(x.shape), eps) * norms[0]
    gate = (key * (rms(x, eps) * norms[1])).sum(-1, keepdim=True) / math.sqrt(hidden)
    gate = gate.abs().clamp_min(least).sqrt() * gate.sign()
    gated = gate.sigmoid() * value[:, None, :]
    normed = (rms(gated, eps) * norms[2]).flatten(1)
    x += gated
    x += F.silu(causal_conv(torch.cat((tail, normed)), taps.unbind(), dilation)).view(x.shape)
    return normed


def fetch_named(place: torch.Tensor, tokens: torch.Tensor | None, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """out fp32 [W] = the row of matrix [V, W] whose token `place` names, or zeros (lanes.kernels.fetch)."""
    at = int(place)
    token = at if tokens is None or at < 0 else int(tokens[at])
    out[:] = matrix[token].float() if at >= 0 else 0.0


def gated_norm(out: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, eps: float, *, silu: bool) -> torch.Tensor:
    """fp32 [R, N * V]."""
    gate = z.unflatten(1, out.shape[1:])
    gate = F.silu(gate) if silu else gate.sigmoid()
    return (rms(out, eps) * norm * gate).flatten(1)


def attention_inputs(
    shape: AttentionShape, projected: torch.Tensor, length: int, norms: Norms, angles: Angles, eps: float, kept: Kept
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(queries fp32 [R, A, D], index queries fp32 [R, I, J]); `kept` gains the rows and the blocks they complete."""
    wide, index = shape.kv_heads * shape.head_dim, shape.index_heads * shape.index_dim
    parts = projected.split((2 * shape.heads * shape.head_dim, wide, wide, index, shape.index_dim), dim=1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    q = parts[0].unflatten(1, (shape.heads, 2, shape.head_dim))[:, :, 0]
    k, v = (x.unflatten(1, (shape.kv_heads, shape.head_dim)) for x in parts[1:3])
    rows = slice(length, length + len(projected))
    kept.keys[:, rows] = rotate(rms(k, eps) * norms.key, cos, sin).transpose(0, 1).to(kept.keys.dtype)
    kept.values[:, rows] = v.transpose(0, 1).to(kept.values.dtype)
    kept.raw_keys[rows] = parts[4].to(kept.raw_keys.dtype)
    for r, end in enumerate(range(rows.start + 1, rows.stop + 1)):
        if end % shape.block_tokens == 0:
            mean = kept.raw_keys[end - shape.block_tokens : end].float().mean(0).to(kept.raw_keys.dtype).float()
            key = rotate(rms(mean, eps) * norms.index_key, angles.block_cos[r], angles.block_sin[r])
            kept.block_keys[end // shape.block_tokens - 1] = key
    index_q = parts[3].unflatten(1, (shape.index_heads, shape.index_dim))
    return rotate(rms(q, eps) * norms.query, cos, sin), rotate(rms(index_q, eps) * norms.index_query, cos, sin)


def chosen_blocks(
    queries: torch.Tensor, block_keys: torch.Tensor, length: int, block_tokens: int, chosen: int
) -> list[torch.Tensor]:  # fmt: skip
    """Ids int64, ascending, that each row of queries [R, I, J] reads: `chosen` of its complete blocks, or all."""
    found = []
    for r, query in enumerate(queries):
        complete = (length + r + 1) // block_tokens
        scores = (query @ block_keys[:complete].T).relu().sum(0) * queries.shape[2] ** -0.5
        found.append(top_lowest(scores, chosen) if complete > chosen else torch.arange(complete))
    return found


def attention(
    queries: torch.Tensor, chosen: list[torch.Tensor], length: int, block_tokens: int, kept: Kept, gates: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """fp32 [R, A, D]: queries [R, A, D] over each row's chosen blocks and its open block, times sigmoid(gates)."""
    group = queries.shape[1] // kept.keys.shape[0]
    out = torch.empty(queries.shape)
    for r, blocks in enumerate(chosen):
        end = length + r + 1
        tokens = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()
        tokens = torch.cat((tokens, torch.arange(end // block_tokens * block_tokens, end)))
        for kv in range(kept.keys.shape[0]):
            keys, values = (x[kv, tokens].float() for x in (kept.keys, kept.values))
            for head in range(kv * group, kv * group + group):
                scores = keys @ queries[r, head].float() * queries.shape[2] ** -0.5
                out[r, head] = scores.softmax(0) @ values
    return out * gates.sigmoid()
