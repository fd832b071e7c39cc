"""The gated delta rule for training: everything in batched products, also the way from chunk to chunk.

    S <- exp(g) S;   S <- S + k (x) beta (v - S^T k);   o = S^T q

Within a chunk the writes solve a unit lower triangular system, inverted by halves (as stable as substitution). Over a
chunk the state moves by an affine map, S -> A S + B; the states before all chunks come from a scan of these maps, twice
as many products as chunks, in 2 log(chunks) steps. `naive` is the truth, token by token.

Letters: B sequences, N heads, T tokens, K key size, V value size, C chunk, M chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHUNK_TOKENS = 64
TINY = 8  # rows of a product


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Token by token; shapes as in `delta_rule`."""
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        wrong = v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)
        state = state + k[:, :, t, :, None] * (wrong * beta[:, :, t, None])[:, :, None]
        out.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(out, 2)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, chunk: int = CHUNK_TOKENS
) -> torch.Tensor:
    """o [B, N, T, V] from zero states; all fp32. q, k [B, N, T, K], normalised, q scaled; v [B, N, T, V]; g, beta
    [B, N, T], g <= 0. `chunk` is a power of two.
    """  # fmt: skip
    tokens = q.shape[2]
    gap = -tokens % chunk
    if gap:
        q, k, v = (F.pad(x, (0, 0, 0, gap)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, gap)) for x in (g, beta))
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))  # [B, N, M, C, K or V]
    beta = beta.unflatten(2, (-1, chunk))[..., None]
    total = g.unflatten(2, (-1, chunk)).cumsum(-1)  # log of the decay since the chunk's start, [B, N, M, C]
    past = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~past, -torch.inf).exp()  # from j to i >= j
    kept = total.exp()[..., None]

    weighted = k * beta
    inverse = UnitInverse.apply(((weighted @ k.mT) * between).tril(-1))
    values = inverse @ (v * beta)  # what is written where the state before is zero, [B, N, M, C, V]
    reads = inverse @ (weighted * kept)  # how the state before changes it, [B, N, M, C, K]
    writing = (k * (total[..., -1:] - total).exp()[..., None]).mT  # [B, N, M, K, C]
    across = torch.diag_embed(kept[..., -1, :].expand(*kept.shape[:3], k.shape[-1]))
    before = states_before(across - writing @ reads, writing @ values)  # [B, N, M, K, V]
    written = values - reads @ before
    out = (q * kept) @ before + ((q @ k.mT) * between) @ written
    return out.flatten(2, 3)[:, :, :tokens]


def states_before(across: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """States [B, N, M, K, V] before each of M maps S -> across S + added, from zero; across [B, N, M, K, K]."""
    maps = across.shape[2]
    if maps == 1:
        return torch.zeros_like(added)
    if maps % 2:  # one more that nothing follows
        across, added = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (across, added))
    first, second = across[:, :, 0::2], across[:, :, 1::2]
    one, two = added[:, :, 0::2], added[:, :, 1::2]
    even = states_before(second @ first, second @ one + two)
    odd = first @ even + one
    return torch.stack((even, odd), 3).flatten(2, 3)[:, :, :maps]


class UnitInverse(torch.autograd.Function):
    """(1 + L)^-1 for strictly lower triangular L [..., C, C], C a power of two."""

    @staticmethod
    def forward(ctx: Any, lower: torch.Tensor) -> torch.Tensor:
        """The inverse, kept for the way back."""
        inverse = unit_inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Two products: -(X^T grad X^T), below the diagonal."""
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def unit_inverse(lower: torch.Tensor) -> torch.Tensor:
    """By halves: the inverse of [[A, 0], [X, D]] is [[A', 0], [-D' X A', D']]."""
    size = lower.shape[-1]
    inverse = lower.new_ones(*lower.shape[:-2], size, 1, 1)
    half = 1
    while half < size:
        blocks = lower.unflatten(-1, (-1, 2 * half)).unflatten(-3, (-1, 2 * half))  # [..., n, 2h, n, 2h]
        blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., n, 2h, 2h]
        corner = blocks[..., half:, :half]
        above, below = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = -_product(_product(below, corner), above)
        top = torch.cat((above, torch.zeros_like(above)), -1)
        inverse = torch.cat((top, torch.cat((left, below), -1)), -2)
        half *= 2
    return inverse[..., 0, :, :]


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; hundreds of thousands of tiny products are sums, not a call of a library that batches 65,535 at most."""
    return a @ b if a.shape[-1] > TINY else (a[..., None] * b[..., None, :, :]).sum(-2)
