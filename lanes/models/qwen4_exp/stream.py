"""Hyper-connections: every token carries S residual streams; a mixer reads one vector out of them.

    n   = rms(x_i) * w                       each stream normalised on its own
    m   = sigmoid(Up(silu(Down(n) / S)))     [S, H]
    u   = mean over streams of m_i * n_i     what a block sees; there is no other input norm
    inj = 2 * sigmoid(Inject(n) / S)         [S]
    x_i += inj_i * block(u)

After the last layer the same mixer, without injection, gives the vector that the head reads.

Letters: R rows, S streams, H hidden, L low rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from lanes.models.ops import alike, product, rms
from lanes.models.qwen4_exp.rows import Rows
from lanes.models.qwen4_exp.spec import Spec
from lanes.models.weights import Weights


class Block(Protocol):
    """What runs inside a hyper-connection: one vector per row in, one out."""

    def __call__(self, u: torch.Tensor, rows: Rows) -> torch.Tensor:
        """u, result: fp32 [R, H]."""
        ...


class Mixer:
    """Reads one vector per row out of the streams."""

    def __init__(self, spec: Spec, weights: Weights, *, injects: bool) -> None:
        wide = spec.streams * spec.hidden
        self._streams, self.lowrank, self.eps = spec.streams, spec.lowrank, spec.eps
        self.norm = 1.0 + weights.vector("hc_norm.weight", wide).view(spec.streams, spec.hidden)
        parts = [("input_mix_weight_down.weight", spec.lowrank)]
        if injects:
            parts.append(("block_inject_weight.weight", spec.streams))
        self.down = weights.matrix(*parts, columns=wide)  # [L (+ S), S·H]
        self.up = weights.matrix(("input_mix_weight_up.weight", wide), columns=spec.lowrank)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, S, H] to (u [R, H], injection [R, S], empty without injection)."""
        normed = rms(x, self.eps) * self.norm
        low = product(normed.flatten(1), self.down) / self._streams
        mix = product(alike(F.silu, low[:, : self.lowrank]), self.up).sigmoid_().view_as(normed)
        return mix.mul_(normed).mean(1), 2 * torch.sigmoid(low[:, self.lowrank :])


@dataclass(frozen=True, slots=True)
class Owed:
    """Streams x [R, S, H] that still lack injection [R, S] * result [R, H]: whoever reads them next adds it."""

    x: torch.Tensor
    injection: torch.Tensor
    result: torch.Tensor


Streams = torch.Tensor | Owed


def whole(x: Streams) -> torch.Tensor:
    """The streams [R, S, H] with what they lack, in place."""
    if isinstance(x, Owed):
        return x.x.addcmul_(x.injection[:, :, None], x.result[:, None, :])
    return x


class Mixing(Protocol):
    """What mixes in a Mixer's place."""

    def __call__(self, mixer: Mixer, x: Streams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x to (x whole, in place; u, injection as of `Mixer`)."""
        ...


class Connected:
    """A block with its hyper-connection: x += injection * block(mixed x)."""

    def __init__(self, spec: Spec, weights: Weights, block: Block) -> None:
        self.mixer, self.block = Mixer(spec, weights, injects=True), block
        self.mixing: Mixing | None = None

    def __call__(self, x: Streams, rows: Rows) -> Streams:
        """x [R, S, H], changed in place and returned; another's mixing leaves the sum to the next block."""
        if self.mixing is not None:
            x, u, injection = self.mixing(self.mixer, x)
            return Owed(x, injection, self.block(u, rows))
        x = whole(x)
        u, injection = self.mixer(x)
        return whole(Owed(x, injection, self.block(u, rows)))
