"""Keys and values in a byte each: a row of a head is codes -127..127 times one fp32 scale, the row's greatest / 127.

Not here: where rows are kept (sequence). Half of what bf16 takes, and approximate: a value is off by half a scale at
most. Invariant: decoding what was encoded gives rows whose encoding is the same codes; a row that is not finite stays
not finite.

Letters: KV key/value heads, T rows, D head size.
"""

from __future__ import annotations

import torch

MOST = 127.0


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x fp32 [KV, T, D] as codes int8 [KV, T, D] and scales fp32 [KV, T, 1]."""
    scales = (x.abs().amax(-1, keepdim=True) / MOST).clamp_min_(torch.finfo(torch.float32).tiny)
    codes = (x / scales).round_().clamp_(-MOST, MOST)
    return codes.nan_to_num_(0.0).to(torch.int8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows again, in `dtype`."""
    return (codes * scales).to(dtype)
