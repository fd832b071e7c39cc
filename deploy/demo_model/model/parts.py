"""Small pieces that several modules share: norms, rotations, convolutions, and the mixer of the residual streams.

Letters: B sequences, T tokens, S streams, H hidden, L low rank, C channels, P rotated pairs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: fp32 [T, P]


def working(x: torch.Tensor) -> torch.Tensor:
    """x in the type of products: autocast's where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Norm(nn.Module):
    """RMS norm over the last `size` values with a weight centred on zero; more weights than `size`: groups."""

    def __init__(self, weights: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weights))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D], or [..., S, H] with S * H weights."""
        shape = x.shape[-1:] if x.shape[-1] == self.weight.shape[0] else x.shape[-2:]
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self._eps)
        return working(normed * (1.0 + self.weight.view(shape)))


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """A matrix without bias, its values of standard deviation gain / sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


class Taps(nn.Module):
    """Depthwise causal convolution along T, as shifted products; `weight` is [C, 1, taps] as a Conv1d has it."""

    def __init__(self, channels: int, taps: int, dilation: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, taps) * std)
        self._dilation = dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, result: [B, T, C]."""
        taps = working(self.weight[:, 0]).unbind(-1)
        reach = (len(taps) - 1) * self._dilation
        padded = F.pad(x, (0, 0, reach, 0))
        out = x * taps[-1]
        for place, tap in enumerate(taps[:-1]):
            first = place * self._dilation
            out = out + padded[:, first : first + x.shape[1]] * tap
        return out


def rotation(first: int, tokens: int, dims: int, theta: float, device: torch.device) -> Rotation:
    """cos and sin of positions first .. first + tokens - 1."""
    frequencies = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims)
    angles = torch.arange(first, first + tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Rotates the first 2P dimensions of x [B, T, heads, D], pairs (i, i + P)."""
    cos, sin = (part[:, None] for part in at)
    pairs = cos.shape[-1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]), dim=-1).to(x.dtype)


class Inject(nn.Module):
    """Adds a block's answer to the streams; a module, so that it can be compiled."""

    def forward(self, x: torch.Tensor, injection: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """[B, T, S, H] of x [B, T, S, H], injection [B, T, S], y [B, T, H]."""
        return x + injection[..., None] * y[..., None, :]


class Mixer(nn.Module):
    """Reads one vector out of the streams, and says how much of a block's answer each stream gets."""

    def __init__(self, streams: int, hidden: int, lowrank: int, eps: float, *, injects: bool) -> None:
        super().__init__()
        wide = streams * hidden
        self.hc_norm = Norm(wide, eps)
        self.input_mix_weight_down = linear(wide, lowrank)
        self.input_mix_weight_up = linear(lowrank, wide)
        self.block_inject_weight = linear(wide, streams) if injects else None
        self._streams = streams

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [B, T, S, H] to (u [B, T, H], injection [B, T, S] or None)."""
        normed = self.hc_norm(x)
        flat = normed.flatten(-2)
        mix = self.input_mix_weight_up(F.silu(self.input_mix_weight_down(flat) / self._streams))
        u = (mix.sigmoid().view_as(normed) * normed).mean(-2)
        if self.block_inject_weight is None:
            return u, None
        return u, 2 * torch.sigmoid(self.block_inject_weight(flat) / self._streams)
