"""What a pack's lane on a GPU must hold to the bit of its sequences: they take turns, branch, leave and come back, and
say ids instead of logits.

Not here: everything else of the table (exactness_cases, exactness_margins). Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from bench.exactness_cases import Case, Ground, bit_equal, close
from lanes import limits
from lanes.sampler import greedy
from lanes.state import snapshot
from lanes.state.checkpoint import Checkpoint
from lanes.state.pool import Branch
from lanes.state.sequence import SequenceState
from lanes.window import Window


def turns(ground: Ground) -> str:
    """Two sequences by turns in the seat, against each alone."""
    lane = ground.lane()
    want, first = ground.said(lane), lane.begin(ground.ids[: ground.prompt])
    other, got = lane.begin(ground.ids[1 : ground.prompt]), []
    for token in ground.rest:
        got.append(lane.windows([token], first, [1]))
        lane.windows([token], other, [1])
    bit_equal(torch.cat(got), want)
    return f"{2 * len(got)} turns"


def branches(ground: Ground) -> str:
    """A branch at a checkpoint gives its root's bits, whether the root is in the seat or in host memory."""
    lane, prompt = ground.lane(), ground.prompt
    root = lane.begin(ground.ids[:prompt])
    state = lane.states[root]
    lane.model.settle(state)
    kept = Checkpoint.of(state)
    want = lane.windows(ground.rest, root, [1])
    lane.model.settle(state)
    for _ in range(2):
        slot = lane.states.open(ground.context_tokens, Branch(state, prompt, prompt))
        kept.into(lane.states[slot])
        bit_equal(lane.windows(ground.rest, slot, [1]), want)
        close(lane, slot)
    return f"{2 * len(want)} tokens of branches"


def ids_alone(ground: Ground) -> str:
    """Windows that are asked for their best ids against the same windows' logits."""
    lane = ground.lane()
    slot = lane.begin(ground.ids[: ground.prompt])

    def ran(rows: int, *, best: bool) -> torch.Tensor:
        ids, length = ground.rest[:rows], lane.states[slot].length
        window = Window.of_sequence(ids, length, slot, logits="all", trial=True, best=best)
        out = lane.model.forward(window, lane.states).clone()  # a trial that is never committed has not happened
        lane.experts.end_window()
        return out

    for rows in (1, 4):
        want = greedy(ran(rows, best=False).numpy())
        assert ran(rows, best=True).tolist() == want.tolist()
        assert (want >= 0).all()
    return "1 and 4 rows"


def parked(ground: Ground) -> str:
    """A state as bytes after some windows, taken back by another lane, goes on as where it stayed."""
    lanes = [ground.lane(), ground.lane()]
    at = len(ground.rest) // 2
    slot = lanes[0].begin(ground.ids[: ground.prompt])
    lanes[0].windows(ground.rest[:at], slot, [3, 1])
    state = lanes[0].states[slot]
    lanes[0].model.settle(state)
    moved = lanes[1].states.open(ground.context_tokens)
    copied = _through_bytes(state, lanes[1].states[moved])
    want = lanes[0].windows(ground.rest[at:], slot, [2, 1])
    bit_equal(lanes[1].windows(ground.rest[at:], moved, [2, 1]), want)
    return f"{copied} bytes of {ground.prompt + at} tokens"


def _through_bytes(state: SequenceState, into: SequenceState) -> int:
    kept, tokens = Checkpoint.of(state), state.length
    into.reserve(tokens)
    count = 0
    for page in range(-(-tokens // limits.PAGE_TOKENS)):
        first, end = snapshot.page_range(page, tokens)
        data = snapshot.pack(state.rows(first, end))
        snapshot.unpack_page(data, into, first, end, end)
        count += data.nbytes
    data = snapshot.pack(kept.tensors)
    snapshot.unpack_fixed(data, into)
    kept.into(into)
    return count + data.nbytes


STATES: dict[str, Case] = {
    "turns in the seat": turns,
    "branches": branches,
    "parked, another lane": parked,
    "ids instead of logits": ids_alone,
}
