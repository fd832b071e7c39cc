"""The seat: a state keeps its values wherever it lies, and what it leaves behind is zero."""

import pytest
import torch

from lanes.state.checkpoint import Checkpoint
from lanes.state.host import PLAIN
from lanes.state.pool import StatePool
from lanes.state.seat import Seat
from lanes.state.sequence import SequenceState
from tests.fakes.late_host import LateHost
from tests.fakes.states import SHAPE, fresh, read, same

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def tensors(state: SequenceState) -> list[torch.Tensor]:
    growing = [getattr(a, name) for a in state.attention.values() for name in ("keys", "values", "raw_index_keys")]
    return growing + [a.block_keys for a in state.attention.values()] + state.fixed()


def places(state: SequenceState) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors(state) if tensor.numel()]


def test_a_state_comes_and_goes_unchanged():
    seat, state = Seat(SHAPE, 64, "cpu"), SequenceState(SHAPE, 64)
    read(state, IDS[:4])
    before = tensors(state)
    seat.take(state)
    assert state.seated
    assert seat.occupant is state
    fixed = set(places(seat.home)) - set(places(SequenceState(SHAPE, 64)))
    assert set(places(state)) & fixed
    assert not any(
        tensor.any() for tensor in before if tensor is not state.context_ids and tensor is not state.draft.ids
    )
    for token in IDS[4:]:
        read(state, [token])
    seat.leave()
    assert not state.seated
    assert same(state, fresh(IDS))
    assert state.allocated_tokens == len(IDS)
    assert not any(tensor.any() for tensor in tensors(seat.home) if tensor.is_floating_point())


def test_taking_turns_keeps_the_seats_addresses():
    seat = Seat(SHAPE, 64, "cpu")
    states = [SequenceState(SHAPE, 64), SequenceState(SHAPE, 32)]
    seat.take(states[0])
    where = places(states[0])
    for at in range(0, len(IDS), 2):
        for n, state in enumerate(states):
            seat.take(state)
            assert [p for p in places(state) if p in where]
            read(state, [IDS[at] + n])
    for n, state in enumerate(states):
        assert same(state, _fresh_of([IDS[at] + n for at in range(0, len(IDS), 2)]))
        assert state.allocated_tokens >= 5


def _fresh_of(ids: list[int]) -> SequenceState:
    state = SequenceState(SHAPE, len(ids))
    for token in ids:
        read(state, [token])
    return state


@pytest.mark.parametrize("seated", [True, False])
@pytest.mark.parametrize("tokens", [1, 5, 8, 10])
@pytest.mark.parametrize("host", [PLAIN, LateHost()])
def test_a_branch_sits_down_with_its_roots_rows(seated, tokens, host):
    seat, root, branch = Seat(SHAPE, 64, "cpu", host), SequenceState(SHAPE, 64), SequenceState(SHAPE, 32)
    read(root, IDS)
    seat.take(root)
    if not seated:
        seat.leave()
    kept = fresh(IDS[:tokens])
    seat.branch(branch, root, tokens)
    assert seat.occupant is branch
    assert not any(rows.any() for rows in branch.rows(-(-tokens // 4) * 4, 64)), "nothing of the root past them"
    Checkpoint.of(kept).into(branch)
    assert same(branch, kept)
    read(branch, [8, 9])
    assert same(root, fresh(IDS)), "the root is whole, wherever it lies"
    assert not root.seated
    seat.take(root)
    assert same(root, fresh(IDS))


def test_a_seated_state_that_is_closed_leaves_nothing():
    pool, seat = StatePool(SHAPE, 1 << 20), Seat(SHAPE, 64, "cpu")
    slot = pool.open(64)
    seat.take(pool[slot])
    read(pool[slot], IDS)
    pool[slot].length = 2  # rows past the length are zeroed too
    pool.close(slot)
    assert not any(t.any() for t in tensors(seat.home) if t.is_floating_point())
    assert seat.occupant is None
