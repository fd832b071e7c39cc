"""Cases of the fetch kernels, for either device."""

from __future__ import annotations

import torch

from lanes.kernels import naive
from lanes.kernels.fetch import fetch, fetch_named


def check_fetch(device: str, dtype: torch.dtype, count: int) -> None:
    """All of it arrives, nothing behind it is touched, and a later launch sees what the host wrote meanwhile."""
    source = torch.zeros(count, dtype=dtype, pin_memory=device == "cuda")
    room = torch.full((count + 7,), 99, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(count)
    for _ in range(3):
        source.copy_(torch.randint(-128, 127, (count,), generator=generator))
        fetch(source, room[:count])
        got = room.cpu()
        assert torch.equal(got[:count], source)
        assert (got[count:] == 99).all()


def check_fetch_named(device: str, dtype: torch.dtype, width: int, *, narrow: bool) -> None:
    """The row of every kind of place, as its twin has it; nothing behind it is touched."""
    generator = torch.Generator().manual_seed(width)
    matrix = torch.randn((9, width), generator=generator).to(dtype)
    tokens = torch.tensor([0, 2, 8]) if narrow else None
    if device == "cuda":
        matrix = matrix.pin_memory()
    place = torch.zeros(1, dtype=torch.int64, pin_memory=device == "cuda")
    room = torch.full((width + 7,), 99.0, device=device)
    for at in (0, 2, -1, 1):
        place[0] = at
        fetch_named(place, None if tokens is None else tokens.to(device), matrix, room[:width])
        want, got = torch.empty(width), room.cpu()
        naive.fetch_named(place, tokens, matrix, want)
        assert torch.equal(got[:width], want), (at, narrow)
        assert (got[width:] == 99).all()
