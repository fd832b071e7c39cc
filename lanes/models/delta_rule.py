"""The gated delta rule, twice: token by token, which is the truth, and by chunks, for long windows.

    S <- exp(g) S;   S <- S + k (x) beta (v - S^T k);   o = S^T q

`recurrent` does the same operations for a token whatever else is in the window, so a window of T rows gives the bits of
T windows of one row. `chunked` agrees to rounding. Both update S in place. Not here: projections, norms, convolution.

Letters: T tokens, N value heads, K key size, V value size, C chunk, B chunks of a group.
"""

from __future__ import annotations

import torch

CHUNK_TOKENS = 64
GROUP_CHUNKS = 8  # chunks whose [C, C] matrices are alive at once: 6 MB of fp32 for 48 heads each
RECURRENT_TOKENS = 8  # up to here token by token: always exact for the windows of decoding


def delta_rule(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Advances `matrix` [N, K, V] by T tokens and returns o [T, N, V]; all fp32.

    q, k: [T, N, K], normalised, q scaled; v: [T, N, V]; g, beta: [T, N], g <= 0.
    """
    rule = recurrent if q.shape[0] <= RECURRENT_TOKENS else chunked
    return rule(matrix, q, k, v, g, beta)


def recurrent(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Token by token; shapes as in `delta_rule`.

    S is read once for both k and q: with the decayed S, S^T q after the write is S^T q + (k . q) delta.
    """
    out = torch.empty_like(v)
    tokens = zip(
        g[..., None, None].unbind(),  # [N, 1, 1]
        torch.stack((k, q), dim=2).unbind(),  # [N, 2, K]
        (k * q).sum(-1, keepdim=True).unbind(),  # [N, 1]
        k[..., None].unbind(),  # [N, K, 1]
        v.unbind(),
        beta[..., None].unbind(),
        out.unbind(),
        strict=True,
    )
    for decay, both, match, key, value, rate, result in tokens:
        matrix.mul_(decay.exp())  # of one token at a time: an exponential's last bits depend on what is beside it
        wrong, read = torch.bmm(both, matrix).unbind(1)  # S^T k, S^T q: [N, V]
        delta = (value - wrong).mul_(rate)
        torch.addcmul(read, match, delta, out=result)
        matrix.baddbmm_(key, delta[:, None])
    return out


def chunked(
    matrix: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """By chunks of up to 64 tokens; shapes as in `delta_rule`.

    Within a chunk the writes depend on each other through a unit lower triangular system (the UT transform), solved
    once for all chunks of a group; then one pass over the chunks carries S. Memory is bounded by the group.
    """
    tokens, group = q.shape[0], CHUNK_TOKENS * GROUP_CHUNKS
    out = torch.empty_like(v)
    first = 0
    while first < tokens:
        left = tokens - first
        rows = min(group, left // CHUNK_TOKENS * CHUNK_TOKENS) or left
        part = slice(first, first + rows)
        chunk = min(CHUNK_TOKENS, rows)
        out[part] = _group(matrix, q[part], k[part], v[part], g[part], beta[part], chunk)
        first += rows
    return out


def _group(
    matrix: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """Some whole chunks of equal length."""

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, chunk, *x.shape[1:]).movedim(2, 0).contiguous()  # [N, B, C, ...]

    q, k, v, beta = by_head(q), by_head(k), by_head(v), by_head(beta)[..., None]
    # Log of the decay from the chunk's start through each token [N, B, C], in fp64: totals reach -1000 where a head
    # forgets quickly, and their differences would lose four digits in fp32.
    total = by_head(g).double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().float().exp().tril()  # decay from token j to i >= j
    kept = total.float().exp()[..., None]  # [N, B, C, 1]

    weighted = k * beta
    system = (weighted @ k.mT).mul_(between)  # the diagonal is taken as 1 by the solver
    wanted = torch.cat((v * beta, weighted * kept), dim=-1)  # [N, B, C, V + K]
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    inside = (q @ k.mT).mul_(between)  # [N, B, C, C]
    asking = q * kept
    writing = k * (total[..., -1:] - total).float().exp()[..., None]
    across = kept[:, :, -1, :, None]  # [N, B, 1, 1]

    out = torch.empty_like(v)
    for b in range(v.shape[1]):
        new = torch.baddbmm(values[:, b], reads[:, b], matrix, alpha=-1)  # [N, C, V]
        torch.baddbmm(asking[:, b] @ matrix, inside[:, b], new, out=out[:, b])
        matrix.mul_(across[:, b]).baddbmm_(writing[:, b].mT, new)
    return out.movedim(0, 2).flatten(0, 1)  # [T, N, V]
