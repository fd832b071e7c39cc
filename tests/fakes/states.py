"""A model without weights over real states: what it writes depends on every token before, so a wrong prefix shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lanes.state.sequence import SequenceState
from lanes.state.shape import AttentionShape, DraftShape, NgramShape, RecurrentShape, StateShape
from lanes.window import Window

SHAPE = StateShape(
    attention={1: AttentionShape(2, 4, 3, 4, torch.bfloat16), 2: AttentionShape(1, 2, 2, 2, torch.float32)},
    recurrent={0: RecurrentShape(1, 2, 3, 4, 3)},
    ngram={0: NgramShape(5, 2)},
    context_ids=2,
    context_fill=7,
    max_tokens=4096,
    draft=DraftShape(2, 6, 2),
)


def read(state: SequenceState, ids: list[int], *, half: bool = False) -> None:
    """Advances a state by tokens; with `half` it is left in the middle, as a cancelled pass leaves it."""
    start = state.length
    state.reserve(start + len(ids))
    matrix = state.recurrent[0].matrix
    for at, token in enumerate(ids, start):
        matrix.mul_(0.5).add_(float(token % 97) + at % 13)
        for rows in (rows for rows in state.rows(at, at + 1) if rows.numel()):
            rows.copy_((matrix.sum() + torch.arange(rows.numel()).view(rows.shape) % 5).expand_as(rows))
    if half:
        state.broken = True
        return
    state.recurrent[0].conv.fill_(float(matrix.sum()) / 3)
    state.ngram[0].conv.fill_(float(ids[-1]))
    state.context_ids.copy_(torch.tensor([*state.context_ids.tolist(), *ids][-2:]))
    if state.draft is not None:
        state.draft.streams.fill_(float(matrix.sum()) / 7)
        state.draft.ids.fill_(ids[-1])
        state.draft.waiting = min(2, start + len(ids))
    state.length += len(ids)


# Rows of which a memory page holds eight: branches share pages. With a draft layer, as above.
WIDE = replace(
    SHAPE,
    attention={1: AttentionShape(2, 128, 64, 4, torch.float32), 2: AttentionShape(1, 256, 200, 2, torch.bfloat16)},
)


def fresh(ids: list[int], shape: StateShape = SHAPE) -> SequenceState:
    """The state after these tokens, never taken from anywhere."""
    state = SequenceState(shape, max(1, len(ids)))
    for token in ids:  # one at a time: what a window's size does is not this model's business
        read(state, [token])
    return state


def same(a: SequenceState, b: SequenceState) -> bool:
    """Whether two states are equal to the bit in all that is ever read."""
    waiting = (a.draft.waiting if a.draft else 0, b.draft.waiting if b.draft else 0)
    kept = len(a.fixed()) - (0 if waiting[0] else 2)  # what waits for a draft layer is read only where tokens wait
    mine, theirs = ([*s.rows(0, s.length), *s.fixed()[:kept]] for s in (a, b))
    return (
        a.length == b.length
        and waiting[0] == waiting[1]
        and all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    )


def window(slot: int, start: int, ids: list[int]) -> Window:
    """The window that read them."""
    return Window.of_sequence(ids, start, slot)


def prompt_of(rng: np.random.Generator, length: int, alphabet: int = 3) -> list[int]:
    """A prompt of few different tokens, so that prompts share beginnings."""
    return rng.integers(0, alphabet, length).tolist()
