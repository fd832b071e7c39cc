"""A window made ready for the blocks: device tensors, and per sequence the state and the rotations its rows need.

Computed once per window and shared by all layers. Not here: any weight.

Letters: R rows, P rotated pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from lanes.models.errors import WindowError
from lanes.models.near import Near
from lanes.models.qwen4_exp.spec import Spec
from lanes.state.sequence import SequenceState
from lanes.state.trial import Trial
from lanes.window import Window

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: fp32 [rows, P]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows first..end-1 of the window: one sequence's tokens start..stop-1."""

    state: SequenceState
    first: int
    end: int
    start: int
    stop: int
    blocks: Rotation  # of the first token of every index block that these rows complete
    trial: Trial | None = None  # where the rows' changes go instead of the state

    @property
    def rows(self) -> slice:
        """The run's rows in the window."""
        return slice(self.first, self.end)


@dataclass(frozen=True, slots=True)
class Rows:
    """The window's rows in order."""

    token_ids: torch.Tensor  # int64 [R] on the CPU
    runs: tuple[Run, ...]
    rotation: Rotation  # of every row, [R, P]
    near: Near | None = None  # steers the choice of experts; None: exact

    def parts(self, most: int, block_tokens: int) -> Iterator[tuple[slice, Rows]]:
        """Of one sequence's rows: at most so many at a time, in order."""
        (run,) = self.runs
        for first in range(0, run.end, most):
            part = slice(first, min(first + most, run.end))
            start, stop = run.start + part.start, run.start + part.stop
            complete = slice(*(place // block_tokens - run.start // block_tokens for place in (start, stop)))
            cos, sin = (x[complete] for x in run.blocks)
            of = replace(run, first=0, end=stop - start, start=start, stop=stop, blocks=(cos, sin))
            cos, sin = (x[part] for x in self.rotation)
            yield part, Rows(self.token_ids[part], (of,), (cos, sin), self.near)


class Rotary:
    """Angles of positions: fp32 position times fp32 frequency, as the reference has them.

    fp64 angles would differ by 0.005 rad at position 262,143: the checkpoint was trained with the fp32 ones.
    """

    def __init__(self, dims: int, theta: float, device: torch.device) -> None:
        exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
        self.device = device
        self._frequencies = (1.0 / theta**exponents).to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """cos and sin [rows, P] at integer positions [rows]."""
        angles = positions.to(self.device, torch.float32)[:, None] * self._frequencies
        return angles.cos(), angles.sin()


def prepare(window: Window, states: Mapping[int, SequenceState], spec: Spec, rotary: Rotary) -> Rows:
    """Checks that every run continues its state, makes room, and computes the rotations.

    Raises `WindowError` before anything changed, or the state's own error when it has no room.
    """
    check(window, states, spec)
    ids = window.token_ids
    runs: list[Run] = []
    for slot, first, end in window.runs():
        state = states[slot]
        start, stop = state.length, state.length + end - first
        size = spec.index_block_tokens
        blocks = rotary.at(torch.arange(start // size, stop // size, device=rotary.device) * size)
        runs.append(Run(state, first, end, start, stop, blocks, Trial(ids[first:end]) if window.trial else None))
    for run in runs:
        run.state.reserve(run.stop)
        run.state.trial = None
    # Made where they are used: a copy to a GPU would stand behind the records that are on the link.
    positions = [torch.arange(run.start, run.stop, device=rotary.device) for run in runs]
    return Rows(ids, tuple(runs), rotary.at(positions[0] if len(positions) == 1 else torch.cat(positions)))


def check(window: Window, states: Mapping[int, SequenceState], spec: Spec) -> None:
    """Raises `WindowError` where a row's token is unknown or a run does not continue its state."""
    ids = window.ids.tolist()  # of few rows, cheaper than an array
    if min(ids) < 0 or max(ids) >= spec.vocab:
        raise WindowError(f"token ids must be in 0..{spec.vocab - 1}")
    seen: set[int] = set()
    for slot, first, end in window.runs():
        state = states[slot]
        start, stop = state.length, state.length + end - first
        if slot in seen:
            raise WindowError(f"slot {slot}: rows of one sequence must be contiguous")
        if state.broken:
            raise WindowError(f"slot {slot}: an earlier pass failed half way; reset the state first")
        if window.position(first) != start or not window.consecutive(first, end):
            raise WindowError(f"slot {slot}: positions must be {start}..{stop - 1}, one after another")
        seen.add(slot)
