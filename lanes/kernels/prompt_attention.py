"""QSA attention of a prompt's rows: each reads its chosen blocks where they lie, instead of a copy of them.

    a row's tokens     those of its chosen blocks, ascending (of all where it may read all), then the open block's
    a program          one row's queries of one key/value head, over its tokens in steps, by running maximum and sum

A chunk's rows read the same few thousand blocks over and over, so they come from the L2 cache. Twin:
lanes.models.qwen4_exp.attention's dense and gathered rows, to rounding. Not here: which blocks (lanes.kernels.index, or
the model's indexer), decode windows (lanes.kernels.attention). Nothing behind a row's position is read.

Letters: T rows, A heads, KV key/value heads, G = A / KV, D head size, C tokens of the capacity, r tokens per block,
K blocks chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels.attention import AttentionShape, product

# Of keys in one step, and as many of values; three steps are on their way: 96 KiB of shared memory, two programs on a
# multiprocessor of an H200.
STEP_BYTES = 16 << 10
STAGES, WARPS = 3, 4


def attend(
    shape: AttentionShape, queries: torch.Tensor, chosen: torch.Tensor, start: int, keys: torch.Tensor,
    values: torch.Tensor, gates: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """out [T, A, D] of any float type = attention * sigmoid(gate), for queries [T, A, D] from position `start` on.

    chosen int32 [T', K] are the last T' rows' blocks: of every row with more than K complete ones. keys and values
    [KV, C, D] are of the queries' type; gates fp32 [T, A, D], any distances but between elements.
    """
    rows, group, size = queries.shape[0], shape.heads // shape.kv_heads, shape.head_dim
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert chosen.is_contiguous()
    assert keys.stride()[1:] == values.stride()[1:] == (size, 1)
    assert keys.stride(0) == values.stride(0)
    assert gates.stride(2) == 1
    first_chosen = rows - chosen.shape[0]
    complete = (start + first_chosen) // shape.block_tokens  # of the row before the first one with chosen blocks
    assert first_chosen == 0 or complete <= shape.chosen, "a row without chosen blocks cannot read all"
    padded = max(16, triton.next_power_of_2(size))
    step = max(16, min(64, STEP_BYTES // (padded * keys.element_size())))
    _attend_rows[(shape.kv_heads, rows)](
        queries, chosen, keys, values, keys.stride(0), gates, gates.stride(0), gates.stride(1), out, start,
        first_chosen, A=shape.heads, G=group, GP=max(16, triton.next_power_of_2(group)), D=size, DP=padded,
        T=shape.block_tokens, K=shape.chosen, SCALE=size**-0.5, STEP=step, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "first_chosen"])
def _attend_rows(
    queries, chosen, keys, values, kv_stride, gates, gate_row, gate_head, out, start, first_chosen, A: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, K: tl.constexpr,
    SCALE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv, row = tl.program_id(0), tl.program_id(1)
    end = start + row + 1
    complete = end // T
    in_blocks = tl.minimum(complete, K) * T
    count = in_blocks + end - complete * T
    is_chosen = complete > K
    ids = chosen + (row - first_chosen).to(tl.int64) * K
    d = tl.arange(0, DP)
    g = tl.arange(0, GP)
    head = kv * G + g
    heads = (g < G)[:, None] & (d < D)[None, :]
    at = (row.to(tl.int64) * A + head[:, None]) * D + d[None, :]
    q = tl.load(queries + at, mask=heads, other=0.0)  # [GP, DP]
    keys += kv * kv_stride
    values += kv * kv_stride
    top = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    result = tl.zeros((GP, DP), tl.float32)
    for first in tl.range(0, count, STEP, num_stages=STAGES):
        i = first + tl.arange(0, STEP)
        known = i < count
        block = tl.load(ids + i // T, mask=(i < in_blocks) & is_chosen, other=0)
        token = tl.where(i < in_blocks, block * T + i % T, complete * T + i - in_blocks)
        token = tl.where(is_chosen, token, i)
        place = token.to(tl.int64)[:, None] * D + d[None, :]
        inside = known[:, None] & (d < D)[None, :]
        k = tl.load(keys + place, mask=inside, other=0.0)  # [STEP, DP]
        s = product(q, tl.trans(k)) * (SCALE * 1.4426950408889634)  # [GP, STEP], to the base of 2
        s = tl.where(known[None, :], s, float("-inf"))
        before, top = top, tl.maximum(top, tl.max(s, axis=1))
        e = tl.exp2(s - top[:, None])
        shrunk = tl.exp2(before - top)
        total = total * shrunk + tl.sum(e, axis=1)
        v = tl.load(values + place, mask=inside, other=0.0)
        result = result * shrunk[:, None] + product(e.to(v.dtype), v)
    gate = tl.load(gates + row * gate_row + head[:, None] * gate_head + d[None, :], mask=heads, other=0.0)
    tl.store(out + at, result / total[:, None] / (1.0 + tl.exp(-gate)), mask=heads)
