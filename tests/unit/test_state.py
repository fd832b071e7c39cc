"""Sequence state: exact bytes, bounded growth, resets, slots under a budget, typed refusals."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.state.errors import CapacityExceeded, NoFreeSlot, StateBudgetExceeded, StateError, UnknownSlot
from lanes.state.pool import StatePool
from lanes.state.sequence import FIRST_ROWS, SequenceState
from lanes.state.shape import AttentionShape, DraftShape, NgramShape, RecurrentShape, StateShape

SHAPE = StateShape(
    attention={1: AttentionShape(2, 8, 4, 4, torch.bfloat16), 3: AttentionShape(1, 4, 6, 2, torch.float32)},
    recurrent={0: RecurrentShape(3, 4, 5, 7, 3), 2: RecurrentShape(1, 2, 3, 4, 1)},
    ngram={0: NgramShape(16, 9)},
    context_ids=2,
    context_fill=11,
    max_tokens=1000,
)


def poisoned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, float("nan"), dtype=dtype)


def test_bytes_by_hand():
    fixed = 4 * (3 * 4 * 5 + 3 * 7) + 4 * (2 * 3 + 4) + 4 * 9 * 16 + 8 * 2
    assert SHAPE.fixed_bytes() == fixed
    # ten tokens: 2 * (2 * 2 * 8 + 4) each and two blocks of 4 * 4; 4 * (2 * 4 + 6) each and five blocks of 4 * 6
    assert SHAPE.bytes(10) == fixed + 10 * 72 + 2 * 16 + 10 * 56 + 5 * 24


def test_a_draft_layer_is_one_more_attention_layer_and_what_waits_for_it():
    shape = replace(SHAPE, attention={**SHAPE.attention, 4: SHAPE.attention[1]}, draft=DraftShape(4, 24, 5))
    assert shape.bytes(10) == SHAPE.bytes(10) + 10 * 72 + 2 * 16 + 5 * (4 * 24 + 8)
    state = SequenceState(shape, 10, allocate=poisoned)
    state.reserve(10)
    assert state.nbytes() == shape.bytes(10)
    assert (state.draft.streams.shape, state.draft.ids.shape, state.draft.waiting) == ((5, 24), (5,), 0)
    state.draft.waiting = 3
    state.reset()
    assert state.draft.waiting == 0
    assert SequenceState(SHAPE, 10).draft is None


@settings(max_examples=50)
@given(st.integers(1, 1000), st.lists(st.integers(1, 1000), max_size=8))
def test_growth_is_bounded_and_exact(capacity, wishes):
    state = SequenceState(SHAPE, capacity, allocate=poisoned)
    for wish in wishes:
        if wish > capacity:
            with pytest.raises(CapacityExceeded):
                state.reserve(wish)
        else:
            state.reserve(wish)
            assert all(a.rows >= wish for a in state.attention.values())
        assert state.nbytes() <= SHAPE.bytes(capacity)
        assert state.nbytes() == SHAPE.bytes(state.attention[1].rows)
    state.reserve(capacity)
    assert state.nbytes() == SHAPE.bytes(capacity)


def test_growth_doubles_and_keeps_what_was_written():
    state = SequenceState(SHAPE, 1000, allocate=poisoned)
    sizes = set()
    for tokens in range(1, 1001):
        state.reserve(tokens)
        attention = state.attention[1]
        sizes.add(attention.rows)
        attention.keys[:, tokens - 1] = attention.values[:, tokens - 1] = tokens % 100
        attention.raw_index_keys[tokens - 1] = tokens % 100
        if tokens % 4 == 0:
            attention.block_keys[tokens // 4 - 1] = tokens
        state.length = tokens
    assert sorted(sizes) == [FIRST_ROWS, 128, 256, 512, 1000]
    expected = torch.arange(1, 1001) % 100
    assert torch.equal(attention.keys[1, :, 3].long(), expected)
    assert torch.equal(attention.values[0, :, 0].long(), expected)
    assert torch.equal(attention.raw_index_keys[:, 2].long(), expected)
    assert torch.equal(attention.block_keys[:, 1].long(), torch.arange(4, 1001, 4))


def test_a_fresh_and_a_reset_state_start_from_nothing():
    state = SequenceState(SHAPE, 100, allocate=poisoned)
    for _ in range(2):
        assert (state.length, state.broken) == (0, False)
        assert state.context_ids.tolist() == [11, 11]
        for recurrent in state.recurrent.values():
            assert not recurrent.matrix.any()
            assert not recurrent.conv.any()
        assert not state.ngram[0].conv.any()
        state.length, state.broken = 5, True
        state.context_ids.fill_(3)
        for tensor in (state.recurrent[0].matrix, state.recurrent[0].conv, state.ngram[0].conv):
            tensor.fill_(float("nan"))
        state.reset()


def test_capacity_is_within_the_model():
    SequenceState(SHAPE, 1000)
    for tokens in (0, -1, 1001):
        with pytest.raises(CapacityExceeded):
            SequenceState(SHAPE, tokens)


def test_the_pool_stops_at_its_budget():
    pool = StatePool(SHAPE, 2 * SHAPE.bytes(100))
    first, second = pool.open(100), pool.open(100)
    assert (first, second, pool.free_bytes) == (0, 1, 0)
    with pytest.raises(StateBudgetExceeded) as caught:
        pool.open(1)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (SHAPE.bytes(1), 0)
    assert caught.value.retryable
    pool.close(first)
    with pytest.raises(StateBudgetExceeded):
        pool.open(101)
    assert pool.open(100) == first
    assert list(pool) == [1, 0]


def test_slots_and_their_errors():
    pool = StatePool(SHAPE, 1 << 20, slots=2)
    assert [pool.open(4), pool.open(4)] == [0, 1]
    with pytest.raises(NoFreeSlot):
        pool.open(4)
    pool.close(0)
    assert (0 in pool, len(pool)) == (False, 1)
    for use in (pool.close, pool.reset, pool.__getitem__):
        with pytest.raises(UnknownSlot):
            use(0)
    with pytest.raises(CapacityExceeded):
        pool.open(1001)
    assert (pool.open(4), len({e.code for e in StateError.__subclasses__()})) == (0, 6)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "reset"]), st.integers(0, 40)), max_size=30))
def test_reserved_bytes_never_pass_the_budget(steps):
    pool = StatePool(SHAPE, SHAPE.bytes(20) * 3, slots=3)
    for action, number in steps:
        try:
            if action == "open":
                pool.open(number)
            else:
                getattr(pool, action)(number % 3)
        except StateError:
            pass
        assert 0 <= pool.reserved_bytes <= pool.budget_bytes
        assert pool.reserved_bytes == sum(SHAPE.bytes(s.capacity_tokens) for s in pool.values())


@given(st.integers(0, SHAPE.bytes(SHAPE.max_tokens) + 100))
def test_the_most_tokens_that_fit(size_bytes):
    tokens = SHAPE.tokens_in(size_bytes)
    assert tokens == 0 or SHAPE.bytes(tokens) <= size_bytes
    assert tokens == SHAPE.max_tokens or SHAPE.bytes(tokens + 1) > size_bytes
