"""What of sampling belongs on the GPU: the greedy token, also with its probability, and the uniform number of a draw.

Greedy rows then need no logits on the host, and the next window's input is on the device. Cuts and draws stay in
lanes.sampler. Letters: R rows, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lanes.kernels import early

BLOCK = 2048  # logits of one program: 122 programs a row of 248,320, one for almost every multiprocessor
_ROUNDS = tl.constexpr(10)
_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
_MASK = tl.constexpr(0xFFFFFFFF)
_BAD = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # above the key of every finite logit


def blocks(vocabulary: int) -> int:
    """B: columns of the scratch that `greatest` needs."""
    return -(-vocabulary // BLOCK)


def greatest(logits: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
    """out int64 [R] = ids as `lanes.sampler.greedy` has them of logits fp32 [R, V]: the lowest of equal ones, -1 where
    a logit is not finite. scratch int64 [R, B]; `out` may be pinned memory."""
    _greatest(logits, scratch, None, out, None)


def likeliest(
    logits: torch.Tensor, scratch: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, share: torch.Tensor
) -> None:
    """`greatest`, and share fp32 [R]: the probability of each of `out`, where that is not -1. sums fp32 [R, 2, B];
    `share` may be pinned memory."""
    _greatest(logits, scratch, sums, out, share)


def _greatest(
    logits: torch.Tensor, scratch: torch.Tensor, sums: torch.Tensor | None, out: torch.Tensor,
    share: torch.Tensor | None,
) -> None:  # fmt: skip
    rows, vocabulary = logits.shape
    count, summed = blocks(vocabulary), sums is not None
    _block_best[(count, rows)](
        logits, scratch, logits if sums is None else sums, V=vocabulary, B=count, BLOCK=BLOCK, SUMMED=summed,
        num_warps=4, **early.options(),
    )  # fmt: skip
    _best[(rows,)](
        scratch, logits if sums is None else sums, out, logits if share is None else share, B=count,
        BP=triton.next_power_of_2(count), SUMMED=summed, num_warps=1, **early.options(),
    )  # fmt: skip


def uniform(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """out fp64 [R] = lanes.philox.uniform of seeds and positions, int64 [R] (a seed's 64 bits)."""
    rows = seeds.shape[0]
    _uniform[(1,)](seeds, positions, out, R=rows, RP=triton.next_power_of_2(rows), num_warps=1)


@triton.jit
def _block_best(
    logits, scratch, sums, V: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr, SUMMED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    early.behind(EARLY)
    block, row = tl.program_id(0), tl.program_id(1)
    id = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * V + id, mask=id < V, other=float("-inf"))
    # One integer key each, ordered as the value, then the lower id first; + 0.0 makes -0 equal to 0.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (id.to(tl.int64) ^ _MASK)
    key = tl.where((tl.abs(x) < float("inf")) | (id >= V), key, _BAD)
    tl.store(scratch + row * B + block, tl.max(key, axis=0))
    if SUMMED:
        most = tl.max(x, axis=0)
        tl.store(sums + row * (2 * B) + block, most)
        tl.store(sums + row * (2 * B) + B + block, tl.sum(tl.exp(x - most), axis=0))


@triton.jit
def _best(scratch, sums, out, share, B: tl.constexpr, BP: tl.constexpr, SUMMED: tl.constexpr, EARLY: tl.constexpr):
    early.behind(EARLY)
    row = tl.program_id(0)
    b = tl.arange(0, BP)
    key = tl.max(tl.load(scratch + row * B + b, mask=b < B, other=-(1 << 63)), axis=0)
    tl.store(out + row, tl.where(key == _BAD, -1, (key & _MASK) ^ _MASK))
    if SUMMED:
        most = tl.load(sums + row * (2 * B) + b, mask=b < B, other=float("-inf"))
        part = tl.load(sums + row * (2 * B) + B + b, mask=b < B, other=0.0)
        tl.store(share + row, 1.0 / tl.sum(part * tl.exp(most - tl.max(most, axis=0)), axis=0))


@triton.jit
def _uniform(seeds, positions, out, R: tl.constexpr, RP: tl.constexpr):
    r = tl.arange(0, RP)
    seed = tl.load(seeds + r, mask=r < R, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + r, mask=r < R, other=0).to(tl.uint64, bitcast=True)
    # Words of 32 bits in 64-bit registers, so that products are whole.
    k0, k1 = seed & _MASK, seed >> 32
    c0, c1 = position & _MASK, position >> 32
    c2 = c0 & 0
    c3 = c2
    for _ in tl.static_range(_ROUNDS):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    drawn = ((c1 << 32) | c0) >> 11  # 53 bits: exact in fp64, and positive as a signed number
    tl.store(out + r, drawn.to(tl.int64, bitcast=True).to(tl.float64) * (2.0**-53), mask=r < R)
