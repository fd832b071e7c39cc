"""What the host says to a window: where it stands, what was accepted of the last one, its rows' values.

Embedding and n-gram rows are looked up by the host, which knows every token before its window. Parts lie one behind the
other in one buffer on either side; n-gram rows, last of all, may be said later, and where rows stand, first of all, may
be said alone. Not here: what is computed from it.

Letters: R rows, H hidden, P rotated pairs, D columns of an n-gram layer's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from lanes.models.qwen4_exp.gpu.activations import MOST_ROWS
from lanes.models.qwen4_exp.spec import Spec

_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Inputs:
    """Views of one buffer, for the most rows."""

    buffer: torch.Tensor  # uint8
    first: torch.Tensor  # uint8: of it, what a window begins with
    places: torch.Tensor  # uint8: of that, all but the embedding
    length: torch.Tensor  # int32 [1]: tokens before the window
    accepted: torch.Tensor  # int32 [1]: rows of the window before that belong to the sequence
    angles: torch.Tensor  # fp32 [4, R, P]: cos, sin of the rows; cos, sin of the blocks that end there
    embedded: torch.Tensor  # fp32 [R, H]
    ngram: torch.Tensor  # fp32 [n-gram layers, R, D]

    @classmethod
    def of(cls, spec: Spec, device: torch.device | str, *, pinned: bool = False) -> Self:
        """Zeroed."""
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((1,), torch.int32), ((1,), torch.int32), ((4, MOST_ROWS, spec.rotary_dim // 2), torch.float32),
            ((MOST_ROWS, spec.hidden), torch.float32),
            ((len(spec.ngram_layers), MOST_ROWS, spec.ngram_dim), torch.float32),
        ]  # fmt: skip
        sizes = [4 * torch.Size(shape).numel() for shape, _ in shapes]
        rooms = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        buffer = torch.zeros(sum(rooms), dtype=torch.uint8, device=device, pin_memory=pinned)
        views, at = [], 0
        for (shape, dtype), size, room in zip(shapes, sizes, rooms, strict=True):
            views.append(buffer[at : at + size].view(dtype).view(shape))
            at += room
        return cls(buffer, buffer[: sum(rooms[:-1])], buffer[: sum(rooms[:-2])], *views)
