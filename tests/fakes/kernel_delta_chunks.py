"""Cases of the delta rule by chunks: against token by token in fp64, and against the model's own chunks."""

from __future__ import annotations

import torch

from lanes.kernels import delta_chunks
from lanes.models.delta_rule import recurrent

TOLERANCE = 2e-5  # of scale; the contract's for fp32 is ten times that


def check_chunks(
    device: str, tokens: int, heads: int, key: int, value: int, *, forgets: float = 1.0, alike: float = 0.0,
    seed: int = 0,
) -> None:  # fmt: skip
    """Rows at distances of their own; `alike`: how much all keys of a head are one; the state is advanced in place."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    both = torch.stack((unit(normal(tokens, heads, key)) * key**-0.5, normal(tokens, heads, key)), dim=1)
    both[:, 1] = unit((1 - alike) * both[:, 1] + 3 * alike * normal(heads, key))
    wide = normal(tokens, heads * value + 5)
    g, beta = (-forgets * torch.rand((tokens, heads), generator=draw), torch.rand((tokens, heads), generator=draw))
    state = 0.1 * normal(heads, key, value)
    both, wide, g, beta, there = (x.to(device) for x in (both, wide, g, beta, state))
    v, exact = wide[:, 5:].view(tokens, heads, value), there.double()
    want = recurrent(exact, *(x.double() for x in (both[:, 0], both[:, 1], v, g, beta)))
    got = delta_chunks.delta_rule(there, both[:, 0], both[:, 1], v, g, beta)
    for ours, its in ((got, want), (there, exact)):
        assert (ours.double() - its).abs().max() <= TOLERANCE * its.abs().max()
