"""The gated delta rule over a long window, by chunks of 64 tokens: three launches for thousands of tokens.

    system   of every chunk and head on its own: k k^T and q k^T with the decays between tokens; decays from its start
    solve    the writes depend on each other through a unit lower triangular system: forward substitution, a tile of
             columns at a time, in blocks of 16 tokens
    across   a program carries some columns of S through all chunks, in order

The algebra is lanes.models.delta_rule's `chunked`, whose twin is `recurrent`. Accuracy: everything is fp32, decays are
differences of fp64 sums; the products of `system` and `across` are split into three of tf32 on tensor cores
("tf32x3", some 2^-21 of their inputs), those of `solve` are fp32. Tokens behind the window's last are zeros that write
nothing.

Letters: T tokens, N value heads, K key size, V value size, B chunks, C = 64 tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK, BLOCK = 64, 16
GROUP = 2048  # tokens whose [C, C] matrices are alive at once: 25 MB of fp32 for 48 heads each
SOLVED = 64  # columns of one program of solve
PRECISION = tl.constexpr("tf32x3")
# Of S in one program of across, and how many of its keys at once: 48 heads of 128 columns are 192 programs.
COLUMNS, WARPS, PARTS = 32, 4, 32


def serves(key: int, value: int) -> bool:
    """Whether heads have sizes that these kernels know."""
    return all(16 <= size <= 256 and size & (size - 1) == 0 for size in (key, value))


def delta_rule(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Advances `matrix` [N, K, V] by T tokens and returns o [T, N, V]; all fp32; K and V as `serves` says.

    q, k: [T, A, K], normalised, q scaled; v: [T, N, V]; g, beta: [T, N], g <= 0. Rows may stand at any distance. A key
    head serves N / A value heads, neighbours.
    """
    tokens, key_heads, key = q.shape
    heads, value = v.shape[1:]
    assert heads % key_heads == 0
    shared = heads // key_heads
    assert matrix.is_contiguous()
    assert serves(key, value), (key, value)
    for x, width in ((q, key), (k, key), (v, value)):
        assert x.stride()[1:] == (width, 1), (x.shape, x.stride())
    g, beta, out = g.contiguous(), beta.contiguous(), torch.empty((tokens, heads, value), device=v.device)
    most = triton.cdiv(min(tokens, GROUP), CHUNK)
    system, inside = (torch.empty((most, heads, CHUNK, CHUNK), device=v.device) for _ in range(2))
    kept, left = (torch.empty((most, heads, CHUNK), device=v.device) for _ in range(2))
    solved = torch.empty((most, heads, CHUNK, value + key), device=v.device)
    width = min(SOLVED, value, key)
    columns = min(COLUMNS, value)
    for first in range(0, tokens, GROUP):
        part = slice(first, min(first + GROUP, tokens))
        rows = part.stop - first
        chunks = triton.cdiv(rows, CHUNK)
        some = (q[part], k[part], v[part], g[part], beta[part])
        _system[(chunks, heads)](
            some[0], some[1], q.stride(0), k.stride(0), some[3], some[4], system, inside, kept, left, rows, N=heads,
            K=key, SHARED=shared, C=CHUNK, PART=min(32, key), num_warps=4, num_stages=1,
        )  # fmt: skip
        _solve[((value + key) // width, chunks, heads)](
            some[1], some[2], k.stride(0), v.stride(0), some[4], kept, system, solved, rows, N=heads, K=key, V=value,
            SHARED=shared, C=CHUNK, BLOCK=BLOCK, WIDTH=width, num_warps=1, num_stages=1,
        )  # fmt: skip
        _across[(value // columns, heads)](
            some[0], some[1], q.stride(0), k.stride(0), kept, left, inside, solved, matrix, out[part], rows, N=heads,
            K=key, V=value, SHARED=shared, C=CHUNK, PART=min(PARTS, key), COLUMNS=columns, num_warps=WARPS,
            num_stages=1,
        )  # fmt: skip
    return out


@triton.jit
def _part(x, stride, chunk, head, rows, first: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, C: tl.constexpr):
    """[C, PART] of a chunk's tokens from column `first` of a head on, zeros behind the last token."""
    t = chunk * C + tl.arange(0, C)
    at = x + t.to(tl.int64)[:, None] * stride + head * D + first + tl.arange(0, PART)[None, :]
    return tl.load(at, mask=(t < rows)[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _system(
    q, k, q_stride, k_stride, g, beta, system, inside, kept, left, rows, N: tl.constexpr, K: tl.constexpr,
    SHARED: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    t = chunk * C + i
    rate = tl.load(beta + t * N + head, mask=t < rows, other=0.0)
    # Log of the decay from the chunk's start through each token: fp32 sums would lose digits of their differences.
    logs = tl.load(g + t * N + head, mask=t < rows, other=0.0).to(tl.float64)
    total = tl.cumsum(logs, axis=0)
    last = tl.sum(logs, axis=0)
    below = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0).to(tl.float32))
    between = tl.where(below, between, 0.0)  # from token j to i >= j
    place = (chunk * N + head) * C
    at = (place + i[:, None]) * C + i[None, :]
    pairs = tl.zeros((C, C), tl.float32)
    asked = tl.zeros((C, C), tl.float32)
    for first in range(0, K, PART):
        keys = _part(k, k_stride, chunk, head // SHARED, rows, first, K, PART, C)
        pairs = tl.dot(keys, tl.trans(keys), pairs, input_precision=PRECISION)
        queries = _part(q, q_stride, chunk, head // SHARED, rows, first, K, PART, C)
        asked = tl.dot(queries, tl.trans(keys), asked, input_precision=PRECISION)
    tl.store(system + at, pairs * rate[:, None] * between)  # the diagonal is taken as 1 by whoever solves
    tl.store(inside + at, asked * between)
    tl.store(kept + place + i, tl.exp(total.to(tl.float32)))
    tl.store(left + place + i, tl.exp((last - total).to(tl.float32)))


@triton.jit(do_not_specialize=["rows"])
def _solve(
    k, v, k_stride, v_stride, beta, kept, system, solved, rows, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SHARED: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns of (1 + system)^-1 [v beta, k beta kept]: the first V are what is written, the others read S."""
    first, chunk, head = tl.program_id(0) * WIDTH, tl.program_id(1), tl.program_id(2)
    column = first + tl.arange(0, WIDTH)
    r = tl.arange(0, BLOCK)
    place = (chunk * N + head) * C
    matrix = system + place * C
    for block in tl.static_range(C // BLOCK):
        i = block * BLOCK + r
        t = chunk * C + i
        known = t < rows
        scale = tl.load(beta + t * N + head, mask=known, other=0.0)
        if first < V:
            at = v + t.to(tl.int64)[:, None] * v_stride + head * V + column[None, :]
        else:
            at = k + t.to(tl.int64)[:, None] * k_stride + head // SHARED * K + (column - V)[None, :]
            scale *= tl.load(kept + place + i)
        x = tl.load(at, mask=known[:, None], other=0.0) * scale[:, None]
        # What blocks before say lies in `solved`, written by this program.
        for before in tl.static_range(block):
            j = before * BLOCK + r
            a = tl.load(matrix + i[:, None] * C + j[None, :])
            y = tl.load(solved + (place + j[:, None]) * (V + K) + column[None, :])
            x -= tl.dot(a, y, input_precision="ieee")
        for row in range(1, BLOCK):
            its = tl.load(matrix + (block * BLOCK + row) * C + block * BLOCK + r, mask=r < row, other=0.0)
            x -= tl.where(r == row, 1.0, 0.0)[:, None] * tl.sum(its[:, None] * x, axis=0)[None, :]
        tl.store(solved + (place + i[:, None]) * (V + K) + column[None, :], x)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows"])
def _across(
    q, k, q_stride, k_stride, kept, left, inside, solved, matrix, out, rows, N: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, SHARED: tl.constexpr, C: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # S stays where it is, in the first cache: registers are needed for operands of three products each. Its parts are
    # read and written by this program alone.
    head = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i, key = tl.arange(0, C), tl.arange(0, PART)
    home = matrix + head * (K * V) + key[:, None] * V + column[None, :]
    for chunk in range(0, tl.cdiv(rows, C)):
        place = (chunk * N + head) * C
        t = chunk * C + i
        there = (t < rows)[:, None]
        at = solved + (place + i[:, None]) * (V + K)
        asks = q + t.to(tl.int64)[:, None] * q_stride + head // SHARED * K + key[None, :]
        writes = k + t.to(tl.int64)[:, None] * k_stride + head // SHARED * K + key[None, :]
        new = tl.load(at + column[None, :])
        result = tl.zeros((C, COLUMNS), tl.float32)
        for first in range(0, K, PART):
            s = tl.load(home + first * V)  # [PART, COLUMNS]
            new -= tl.dot(tl.load(at + V + first + key[None, :]), s, input_precision=PRECISION)
            result = tl.dot(tl.load(asks + first, mask=there, other=0.0), s, result, input_precision=PRECISION)
        result *= tl.load(kept + place + i)[:, None]
        among = tl.load(inside + (place + i[:, None]) * C + i[None, :])
        result = tl.dot(among, new, result, input_precision=PRECISION)
        to = out + (t.to(tl.int64)[:, None] * N + head) * V + column[None, :]
        tl.store(to, result, mask=there)
        whole = tl.load(kept + place + C - 1)
        new *= tl.load(left + place + i)[:, None]
        tl.debug_barrier()
        for first in range(0, K, PART):
            s = tl.load(home + first * V) * whole
            keys = tl.load(writes + first, mask=there, other=0.0)
            tl.store(home + first * V, tl.dot(tl.trans(keys), new, s, input_precision=PRECISION))
        tl.debug_barrier()
