"""Which blocks of a long context each row reads: scores, then the best ones, in at most three launches.

    score     scores[r, b] = sum over heads of relu(q . key_b) / sqrt(J), of complete blocks only
    select    the k best of every chunk of 4,096 blocks
    merge     the k best of those (not launched where the capacity is one chunk)

A prompt's rows are too many for `score`: their products with the keys come from a library, and `choose_rows` goes on.

Shapes are those of the capacity; how many blocks count is computed from `length` on the device, so one graph serves a
conversation as it grows. Rows with at most k complete blocks read everything: no launch does anything for them.

The rule is lanes.models.qwen4_exp.indexer's: equal scores, the lowest block; ids ascending. A value is cut at its k-th
greatest bit pattern, found two bits a step by counting, so the result is exact whatever the values are, and depends on
neither chunks nor capacity. Not here: forming block keys (attention).

Letters: R rows, I index heads, J index size, B blocks of the capacity, r tokens per block, K blocks chosen, N chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SCORED = 32  # blocks of one program of score: 16 KiB of keys, 32 values a thread
CHUNK = 4096  # blocks of one program of select, eight a thread: 262,144 tokens are 16 chunks, 8,192 candidates
MOST_CANDIDATES = 1 << 15
FEW = tl.constexpr(2048)  # candidates of 65,536 tokens: merge has less to look through while a conversation is shorter


@dataclass(frozen=True, slots=True)
class Chosen:
    """Fixed buffers of a window, shared by all layers; `ids` is the result: int32 [R, K], ascending.

    scores fp32 [R, B]; the candidates of N chunks, bits and ids int32 [R, N * K].
    """

    ids: torch.Tensor
    scores: torch.Tensor
    bits: torch.Tensor
    candidates: torch.Tensor

    @classmethod
    def of(cls, rows: int, blocks: int, chosen: int, device: torch.device | str) -> Chosen:
        """For a capacity of so many blocks; allocated once, before any window."""
        chunks = triton.cdiv(blocks, CHUNK)
        width = chunks * chosen if chunks > 1 else 0

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        scores = torch.zeros((rows, blocks), device=device)
        return cls(integers(rows, chosen), scores, integers(rows, width), integers(rows, width))


def serves(blocks: int, chosen: int) -> bool:
    """Whether merge can look through the candidates of a capacity of so many blocks."""
    chunks = triton.cdiv(blocks, CHUNK)
    return blocks <= chosen or chunks == 1 or triton.next_power_of_2(chunks * chosen) <= MOST_CANDIDATES


def choose(
    queries: torch.Tensor, block_keys: torch.Tensor, length: torch.Tensor, block_tokens: int, out: Chosen
) -> None:  # fmt: skip
    """out.ids of every row with more than K complete blocks; of other rows they mean nothing.

    queries fp32 [R, I, J]; block_keys fp32 [B, J]; row r stands at position length[0] + r (integer [1]).
    """
    rows, heads, size = queries.shape
    blocks, chosen = block_keys.shape[0], out.ids.shape[1]
    if blocks <= chosen:
        return
    _score[(triton.cdiv(blocks, SCORED),)](
        queries, block_keys, length, out.scores, R=rows, I=heads, J=size, JP=triton.next_power_of_2(size), B=blocks,
        T=block_tokens, K=chosen, SCALE=size**-0.5, SCORED=SCORED, num_warps=4,
    )  # fmt: skip
    _best_of(out.scores[:, None], blocks, length, block_tokens, out)


def choose_rows(
    products: torch.Tensor, start: int, block_tokens: int, chosen: int, size: int, capacity: int
) -> torch.Tensor:  # fmt: skip
    """int32 [R, K] of rows from position `start` on, which all have more than K complete blocks.

    products fp32 [R, I, B]: index queries times keys of size J, of the blocks that are complete for the last row.
    `capacity` in blocks: what is compiled depends on it instead of on B.
    """
    rows, _, blocks = products.shape
    assert products.is_contiguous()
    assert (start + 1) // block_tokens > chosen, start
    assert (start + rows) // block_tokens <= blocks <= capacity, (start, rows, blocks, capacity)
    chunks, device = triton.cdiv(capacity, CHUNK), products.device
    width = chunks * chosen if chunks > 1 else 0
    ids, bits, candidates = (
        torch.empty((rows, n), dtype=torch.int32, device=device) for n in (chosen, width, width)
    )  # fmt: skip
    length = torch.full((1,), start, dtype=torch.int32, device=device)
    _best_of(products, capacity, length, block_tokens, Chosen(ids, products, bits, candidates), size**-0.5)
    return ids


def _best_of(
    scores: torch.Tensor, capacity: int, length: torch.Tensor, block_tokens: int, out: Chosen, scale: float = 0.0
) -> None:  # fmt: skip
    """scores [R, 1, B]; or with the scale of a score, products [R, I, B]."""
    (rows, heads, blocks), chosen = scores.shape, out.ids.shape[1]
    chunks, width = triton.cdiv(capacity, CHUNK), min(CHUNK, triton.next_power_of_2(capacity))
    _select[(triton.cdiv(blocks, CHUNK), rows)](
        scores, blocks, length, out.ids if chunks == 1 else out.candidates, out.bits, B=0 if scale else blocks, I=heads,
        SCALE=scale, T=block_tokens, K=chosen, N=chunks, CHUNK=width, num_warps=16 if width == CHUNK else 4,
    )  # fmt: skip
    if chunks > 1:
        padded = triton.next_power_of_2(chunks * chosen)
        assert serves(capacity, chosen), (capacity, chosen)
        _merge_chunks[(rows,)](
            out.candidates, out.bits, length, out.ids, T=block_tokens, K=chosen, N=chunks, CHUNK=CHUNK, NP=padded,
            num_warps=8 if padded <= FEW.value else 32,
        )  # fmt: skip


@triton.jit
def _score(
    queries, keys, length, scores, R: tl.constexpr, I: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    B: tl.constexpr, T: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    complete = (tl.load(length) + R) // T  # of the last row
    first = tl.program_id(0) * SCORED
    if (complete > K) & (first < complete):
        b = first + tl.arange(0, SCORED)
        j = tl.arange(0, JP)
        inside = (b < complete)[:, None] & (j < J)[None, :]
        key = tl.load(keys + b.to(tl.int64)[:, None] * J + j[None, :], mask=inside, other=0.0)
        for r in tl.static_range(R):
            total = tl.zeros((SCORED,), tl.float32)
            for i in tl.static_range(I):
                q = tl.load(queries + (r * I + i) * J + j, mask=j < J, other=0.0)
                x = tl.sum(key * q[None, :], axis=1)
                total += tl.where(x < 0.0, 0.0, x)  # NaN stays
            tl.store(scores + r * B + b, total * SCALE, mask=b < complete)


@triton.jit(do_not_specialize=["blocks"])
def _select(
    scores, blocks, length, ids, bits, B: tl.constexpr, I: tl.constexpr, SCALE: tl.constexpr, T: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    complete = (tl.load(length) + row + 1) // T
    first = chunk * CHUNK
    if (complete > K) & (first < complete):
        b = first + tl.arange(0, CHUNK)
        known = b < complete
        stride = blocks if B == 0 else B
        at = scores + row.to(tl.int64) * I * stride + b
        x = tl.load(at, mask=known, other=0.0)
        if SCALE > 0.0:  # products of a row's heads
            x = tl.where(x < 0.0, 0.0, x)  # NaN stays
            for i in tl.static_range(1, I):
                y = tl.load(at + i * stride, mask=known, other=0.0)
                x += tl.where(y < 0.0, 0.0, y)
            x *= SCALE
        # Scores are not negative, so they order as their bits do; + 0.0 makes -0 equal to 0, NaN ranks highest.
        value = tl.where(x == x, (x + 0.0).to(tl.int32, bitcast=True), 0x7FFFFFFF)
        value = tl.where(known, value, -1)
        keep, place = _best(value, K)
        at = row * (N * K) + chunk * K + place
        tl.store(ids + at, b, mask=keep)
        if N > 1:
            tl.store(bits + at, value, mask=keep)


@triton.jit
def _merge_chunks(
    candidates, bits, length, ids, T: tl.constexpr, K: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    NP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    complete = (tl.load(length) + row + 1) // T
    if complete > K:
        if NP <= FEW:
            _merged(candidates, bits, complete, ids, row, K, N, CHUNK, NP)
        else:
            if tl.cdiv(complete, CHUNK) * K <= FEW:
                _merged(candidates, bits, complete, ids, row, K, N, CHUNK, FEW)
            else:
                _merged(candidates, bits, complete, ids, row, K, N, CHUNK, NP)


@triton.jit
def _merged(
    candidates, bits, complete, ids, row, K: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The best of the first WIDTH candidates; a chunk has as many as it has blocks, K at most."""
    slot = tl.arange(0, WIDTH)
    chunk = slot // K
    known = (chunk < N) & (slot - chunk * K < tl.minimum(complete - chunk * CHUNK, CHUNK))
    value = tl.load(bits + row * (N * K) + slot, mask=known, other=-1)
    keep, place = _best(value, K)
    id = tl.load(candidates + row * (N * K) + slot, mask=keep, other=0)
    tl.store(ids + row * K + place, id, mask=keep)


@triton.jit
def _best(value, K: tl.constexpr):
    """(keep, place) of the K greatest of int32 values; -1 is none, equal ones: the first; fewer than K: all."""
    # The greatest `cut` that at least K values reach, from the top: bit 30, then two bits a step. Three counts
    # share one sum.
    cut = tl.where(tl.sum((value >= (1 << 30)).to(tl.int32), axis=0) >= K, 1 << 30, 0)
    for step in tl.static_range(15):
        unit = 1 << (28 - 2 * step)
        reached = (value >= cut + unit).to(tl.int64)
        reached += (value >= cut + 2 * unit).to(tl.int64) << 20
        reached += (value >= cut + 3 * unit).to(tl.int64) << 40
        counts = tl.sum(reached, axis=0)
        cut += unit * ((counts & 0xFFFFF) >= K).to(tl.int32)
        cut += unit * (((counts >> 20) & 0xFFFFF) >= K).to(tl.int32)
        cut += unit * ((counts >> 40) >= K).to(tl.int32)
    greater = value > cut
    equal = value == cut
    room = K - tl.sum(greater.to(tl.int32), axis=0)
    # Both counts, this one included: fewer than K are greater, 32,768 may be equal.
    before = tl.cumsum(greater.to(tl.int32) + (equal.to(tl.int32) << 15), axis=0)
    keep = greater | (equal & ((before >> 15) <= room))
    place = (before & 0x7FFF) + tl.minimum(before >> 15, room) - 1
    return keep, place
