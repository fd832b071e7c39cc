"""QSA attention of a decode window between its products: a layer's projection in, what the output product reads out.

    prepare   queries normed and rotated; keys, values and raw index keys written behind the sequence; block keys of the
              blocks that a row completes
    (choose)  lanes.kernels.index: the blocks of rows that cannot read everything
    attend    each split of a row's tokens on its own: greatest score, sum of exponentials, weighted values
    merge     the splits put together, in order, times sigmoid(gate)

A row's tokens are one list: those of its chosen blocks, ascending (of all blocks where it may read all), then those of
the open block. Splits cut that list, so results depend on neither capacity nor the window's other rows. Keys lie at
fixed addresses; `length` is on the device, so one graph serves a conversation as it grows. Nothing behind a row's
position is read. Rows of one window are one sequence's.

Letters: R rows, A heads, KV key/value heads, G = A / KV, D head size, I index heads, J index size, P rotated pairs,
C tokens of the capacity, r tokens per block, K blocks chosen, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lanes.kernels.arithmetic import INTERPRETED
from lanes.kernels.heads import normed_rotated, partner, rotated

# Of one program of attend: 32 KiB of keys and as much of values in bf16. A full budget of 2,051 tokens is 33 splits: 66
# programs a row.
SPLIT_TOKENS = 64
MERGED = 16  # splits that one step of merge adds up


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    rotated_pairs: int
    block_tokens: int
    chosen: int  # K

    @property
    def splits(self) -> int:
        """S: of the longest list, a full budget and an open block."""
        return -(-((self.chosen + 1) * self.block_tokens - 1) // SPLIT_TOKENS)

    @property
    def columns(self) -> int:
        """Of the projection: per head query and gate, then keys, values, index queries, raw index key."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim + (self.index_heads + 1) * self.index_dim


@dataclass(frozen=True, slots=True)
class Kept:
    """What one sequence remembers in one layer: keys and values [KV, C, D] and raw_keys [C, J] of one float type,
    block_keys fp32 [C / r, J]."""

    keys: torch.Tensor
    values: torch.Tensor
    raw_keys: torch.Tensor
    block_keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights as they are multiplied: query and key fp32 [D], index_query and index_key fp32 [J]."""

    query: torch.Tensor
    key: torch.Tensor
    index_query: torch.Tensor
    index_key: torch.Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin fp32 [R, P] of every row's position, and of the first token of the block that ends there."""

    cos: torch.Tensor
    sin: torch.Tensor
    block_cos: torch.Tensor
    block_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Queries:
    """heads [R, A, D] in the type of the keys; index fp32 [R, I, J]."""

    heads: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Splits before they are merged, shared by all layers: values fp32 [R, S, A, D], greatest and total [R, S, A]."""

    values: torch.Tensor
    greatest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, shape: AttentionShape, rows: int, device: torch.device | str) -> Partial:
        """Allocated once, before any window."""
        sizes = (rows, shape.splits, shape.heads)
        return cls(*(torch.zeros(size, device=device) for size in ((*sizes, shape.head_dim), sizes, sizes)))


def prepare(
    shape: AttentionShape, projected: torch.Tensor, length: torch.Tensor, norms: Norms, angles: Angles, eps: float,
    out: Queries, kept: Kept,
) -> None:  # fmt: skip
    """From projected fp32 [R, columns]; row r stands at position length[0] + r (integer [1])."""
    rows = projected.shape[0]
    assert projected.shape[1] == shape.columns
    assert projected.stride(1) == 1
    _prepare[(shape.heads + 2 * shape.kv_heads + shape.index_heads + 1, rows)](
        projected, projected.stride(0), length, norms.query, norms.key, norms.index_query, norms.index_key, angles.cos,
        angles.sin, angles.block_cos, angles.block_sin, eps, out.heads, out.index, kept.keys, kept.values,
        kept.raw_keys, kept.block_keys, kept.keys.stride(0), A=shape.heads, KV=shape.kv_heads, D=shape.head_dim,
        DP=triton.next_power_of_2(shape.head_dim), I=shape.index_heads, J=shape.index_dim,
        JP=triton.next_power_of_2(shape.index_dim), P=shape.rotated_pairs, T=shape.block_tokens, num_warps=1,
    )  # fmt: skip


def attend(
    shape: AttentionShape, queries: torch.Tensor, chosen: torch.Tensor, length: torch.Tensor, kept: Kept, out: Partial
) -> None:  # fmt: skip
    """The splits of queries [R, A, D] over chosen int32 [R, K] (read for rows with more than K complete blocks)."""
    rows, group = queries.shape[0], shape.heads // shape.kv_heads
    _attend[(shape.splits, shape.kv_heads, rows)](
        queries, chosen, length, kept.keys, kept.values, kept.keys.stride(0), out.values, out.greatest, out.total,
        A=shape.heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=shape.head_dim,
        DP=max(16, triton.next_power_of_2(shape.head_dim)), T=shape.block_tokens, K=shape.chosen, S=shape.splits,
        SCALE=shape.head_dim**-0.5, SPLIT=SPLIT_TOKENS, num_warps=4,
    )  # fmt: skip


def merge(
    shape: AttentionShape, partial: Partial, length: torch.Tensor, gates: torch.Tensor, out: torch.Tensor
) -> None:  # fmt: skip
    """out [R, A, D] of any float type; gates fp32 [R, A, D], any distances but between elements."""
    assert gates.stride(2) == 1
    columns = min(128, triton.next_power_of_2(shape.head_dim))
    _merge_splits[(shape.heads, triton.cdiv(shape.head_dim, columns), gates.shape[0])](
        partial.values, partial.greatest, partial.total, length, gates, gates.stride(0), gates.stride(1), out,
        A=shape.heads, D=shape.head_dim, T=shape.block_tokens, K=shape.chosen, S=shape.splits,
        SP=triton.next_power_of_2(shape.splits), SPLIT=SPLIT_TOKENS, COLUMNS=columns, MERGED=MERGED, num_warps=4,
    )  # fmt: skip


def gates(shape: AttentionShape, projected: torch.Tensor) -> torch.Tensor:
    """[R, A, D]: the view of the projection that holds them."""
    wide = projected[:, : 2 * shape.heads * shape.head_dim]
    return wide.view(-1, shape.heads, 2, shape.head_dim)[:, :, 1]


@triton.jit
def _prepare(
    projected, row_stride, length, norm_q, norm_k, index_norm_q, index_norm_k, cos, sin, block_cos, block_sin, eps,
    queries, index_queries, keys, values, raw_keys, block_keys, kv_stride, A: tl.constexpr, KV: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, I: tl.constexpr, J: tl.constexpr, JP: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    start = tl.load(length).to(tl.int64)
    position = start + row
    x = projected + row * row_stride
    cos += row * P
    sin += row * P
    d = tl.arange(0, DP)
    if part < A:
        query = normed_rotated(x + part * 2 * D, d, norm_q, cos, sin, eps, D, P)
        tl.store(queries + (row * A + part) * D + d, query, mask=d < D)
    elif part < A + KV:
        head = part - A
        key = normed_rotated(x + (2 * A + head) * D, d, norm_k, cos, sin, eps, D, P)
        tl.store(keys + head * kv_stride + position * D + d, key, mask=d < D)
    elif part < A + 2 * KV:
        head = part - A - KV
        value = tl.load(x + (2 * A + KV + head) * D + d, mask=d < D)
        tl.store(values + head * kv_stride + position * D + d, value, mask=d < D)
    else:
        j = tl.arange(0, JP)
        x += 2 * (A + KV) * D
        if part < A + 2 * KV + I:
            head = part - A - 2 * KV
            index_query = normed_rotated(x + head * J, j, index_norm_q, cos, sin, eps, J, P)
            tl.store(index_queries + (row * I + head) * J + j, index_query, mask=j < J)
        else:
            x += I * J
            tl.store(raw_keys + position * J + j, tl.load(x + j, mask=j < J), mask=j < J)
            if (position + 1) % T == 0:
                first = position + 1 - T
                back = x - row * row_stride  # of the window's first row
                mean = _mean(back, row_stride, raw_keys, start, first, j, j < J, J, T)
                other = _mean(back, row_stride, raw_keys, start, first, partner(j, P), j < 2 * P, J, T)
                block_key = rotated(mean, other, j, index_norm_k, block_cos + row * P, block_sin + row * P, eps, J, P)
                tl.store(block_keys + position // T * J + j, block_key, mask=j < J)


@triton.jit
def _mean(window, row_stride, raw_keys, start, first, j, inside, J: tl.constexpr, T: tl.constexpr):
    """Of the raw keys of tokens first..first + T - 1, as they are kept: the window's own from its rows."""
    kind: tl.constexpr = raw_keys.dtype.element_ty
    total = tl.zeros(j.shape, tl.float32)
    for t in tl.static_range(T):
        token = first + t
        here = token >= start
        kept = tl.load(raw_keys + token * J + j, mask=inside & (token < start), other=0.0)
        fresh = tl.load(window + (token - start) * row_stride + j, mask=inside & here, other=0.0)
        total += kept.to(tl.float32) + fresh.to(kind).to(tl.float32)
    return (total / T).to(kind).to(tl.float32)


@triton.jit
def _tokens(length, row, T: tl.constexpr, K: tl.constexpr):
    """(tokens of the row's list, of them in blocks, complete blocks)."""
    end = tl.load(length).to(tl.int32) + row + 1
    complete = end // T
    in_blocks = tl.minimum(complete, K) * T
    return in_blocks + end - complete * T, in_blocks, complete


@triton.jit
def _attend(
    queries, chosen, length, keys, values, kv_stride, partial, greatest, total, A: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    SCALE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    split, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, in_blocks, complete = _tokens(length, row, T, K)
    first = split * SPLIT
    if first < count:
        i = first + tl.arange(0, SPLIT)
        d = tl.arange(0, DP)
        known = i < count
        block = tl.load(chosen + row * K + i // T, mask=(i < in_blocks) & (complete > K), other=0)
        token = tl.where(i < in_blocks, block * T + i % T, complete * T + i - in_blocks)
        token = tl.where(complete > K, token, i)
        at = kv * kv_stride + token.to(tl.int64)[:, None] * D + d[None, :]
        inside = known[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)  # [SPLIT, DP]
        v = tl.load(values + at, mask=inside, other=0.0)
        g = tl.arange(0, GP)
        head = kv * G + g
        q_at = queries + (row * A + head[:, None]) * D + d[None, :]
        q = tl.load(q_at, mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)  # [GP, DP]
        s = product(q, tl.trans(k)) * SCALE  # [GP, SPLIT]
        s = tl.where(known[None, :], s, float("-inf"))
        top = tl.max(s, axis=1)
        e = tl.exp(s - top[:, None])
        out = product(e.to(v.dtype), v)
        place = (row * S + split) * A + head
        tl.store(greatest + place, top, mask=g < G)
        tl.store(total + place, tl.sum(e, axis=1), mask=g < G)
        tl.store(partial + place[:, None] * D + d[None, :], out, mask=(g < G)[:, None] & (d < D)[None, :])


@triton.jit
def product(a, b):
    """fp32 sums of products of either type; the interpreter cannot multiply bf16, whose products fp32 holds exactly."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _merge_splits(
    partial, greatest, total, length, gates, gate_row, gate_head, out, A: tl.constexpr, D: tl.constexpr,
    T: tl.constexpr, K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(2)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    count, _, _ = _tokens(length, row, T, K)
    used = tl.cdiv(count, SPLIT)
    all_splits = tl.arange(0, SP)
    tops = tl.load(greatest + (row * S + all_splits) * A + head, mask=all_splits < used, other=float("-inf"))
    top = tl.max(tops, axis=0)
    value = tl.zeros((COLUMNS,), tl.float32)
    weight = 0.0
    for first in range(0, used, MERGED):
        s = first + tl.arange(0, MERGED)
        known = s < used
        at = (row * S + s) * A + head
        share = tl.exp(tl.load(greatest + at, mask=known, other=float("-inf")) - top)
        weight += tl.sum(share * tl.load(total + at, mask=known, other=0.0), axis=0)
        values = tl.load(partial + at[:, None] * D + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
        value += tl.sum(share[:, None] * values, axis=0)
    gate = tl.load(gates + row * gate_row + head * gate_head + d, mask=d < D, other=0.0)
    value = value / weight / (1.0 + tl.exp(-gate))
    tl.store(out + (row * A + head) * D + d, value, mask=d < D)
