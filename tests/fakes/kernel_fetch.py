"""Cases of the fetch kernel, for either device."""

from __future__ import annotations

import torch

from lanes.kernels.fetch import fetch


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
