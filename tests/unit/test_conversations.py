"""The conversations of a lane against a model whose state depends on every token before: a wrong prefix shows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laneproto.chain import EMPTY, chain
from lanes import limits
from lanes.counters import Counters
from lanes.state.conversations import Conversations
from lanes.state.errors import UnknownSlot
from lanes.state.pool import StatePool
from tests.fakes.states import SHAPE, WIDE, fresh, read, same

CONTEXT = 64


def conversations(kept_tokens=1000, slots=64, shape=SHAPE, *, paged=False):
    pool = StatePool(shape, 0, slots=slots, paged=paged)
    pool.budget_bytes = pool.bytes(CONTEXT) + kept_tokens * (shape.bytes(1) - shape.bytes(0))
    return Conversations(pool, Counters())


def feed(held, slot, ids, *, cut=100):
    """Reads tokens in windows of `cut`, as the engine does."""
    for start in range(0, len(ids), cut):
        part = ids[start : start + cut]
        at = held.pool[slot].length
        read(held.pool[slot], part)
        held.read(slot, at, part)


def turn(held, prompt, answer=(), tenant=b"", *, marks=()):
    """A whole generation; returns the tokens that were not read again."""
    begun = held.begin(prompt, len(prompt) + len(answer), tenant)
    assert same(held.pool[begun.slot], fresh(prompt[: begun.cached_tokens], held.pool.shape))
    at = begun.cached_tokens
    for mark in sorted({*marks, len(prompt)}):
        if at < mark:
            feed(held, begun.slot, prompt[at:mark])
            held.checkpoint(begun.slot)
            at = mark
    feed(held, begun.slot, list(answer))
    held.end(begun.slot)
    return begun.cached_tokens


def test_a_second_turn_reads_the_new_tokens_only():
    held = conversations()
    first, answer = list(range(20)), [90, 91, 92]
    assert turn(held, first, answer) == 0
    assert turn(held, [*first, *answer, 50, 51]) == 23
    assert turn(held, [*first, *answer, 50, 51, 52]) == 25


def test_another_answer_is_taken_up_at_the_end_of_the_prompt():
    held = conversations()
    turn(held, list(range(20)), [90, 91, 92])
    assert turn(held, [*range(20), 77, 78]) == 20
    assert turn(held, [*range(20), 90, 91, 92, 5]) == 23, "the first answer is still there: a copy went on"


def test_the_same_prompt_again_is_read_from_a_checkpoint_before_its_end():
    held = conversations()
    turn(held, list(range(20)), marks=[12])
    assert turn(held, list(range(20))) == 12, "its last token must be read to say what follows"


def test_tokens_are_compared_and_only_within_a_tenant():
    held = conversations()
    turn(held, list(range(20)), tenant=b"a", marks=[10])
    assert turn(held, [*range(20), 1], tenant=b"b") == 0
    assert turn(held, [*range(9), 99, *range(10, 20), 1], tenant=b"a") == 0
    assert turn(held, [*range(20), 1], tenant=b"a") == 20


@pytest.mark.parametrize("done", [0, 6])
def test_cancelled_work_is_never_offered(done):
    held = conversations()
    begun = held.begin(list(range(20)), 20, b"")
    if done:
        feed(held, begun.slot, list(range(done)))
        held.checkpoint(begun.slot)
    read(held.pool[begun.slot], list(range(done, 20)), half=True)
    held.end(begun.slot)
    assert len(held) == (1 if done else 0)
    assert turn(held, [*range(20), 1]) == done


def test_a_prefix_is_visible_only_after_its_pass():
    held = conversations()
    begun = held.begin(list(range(20)), 20, b"")
    assert not list(held.prefixes())
    feed(held, begun.slot, list(range(6)))
    assert list(held.prefixes()) == [(EMPTY, 6)]


def test_prefixes_carry_the_chain_of_their_tokens():
    held = conversations(10_000)
    ids = [i % 7 for i in range(63)]
    turn(held, ids, [3] * 1, tenant=b"t", marks=[10])
    values = chain([*ids, 3], b"t")
    assert set(held.prefixes()) == {(EMPTY, 10), (EMPTY, 63), (values[0], 64)}


def test_without_room_the_least_recently_used_goes():
    held = conversations(kept_tokens=0)
    turn(held, list(range(40)), marks=[])
    assert turn(held, [*range(40), 1]) == 40, "what has room stays"
    turn(held, [9] * 60)
    assert turn(held, [*range(40), 1, 2]) == 0
    assert held.pool.reserved_bytes <= held.pool.budget_bytes


def test_a_conversation_goes_on_itself_when_there_is_no_room_for_a_copy():
    held = conversations(kept_tokens=0)
    turn(held, list(range(40)), [90], marks=[30])
    assert turn(held, [*range(30), *[5] * 20]) == 30
    assert len(held) == 1


def test_slots_are_bounded_and_what_waits_makes_room():
    held = conversations(100_000, slots=3)
    for number in range(10):
        turn(held, [number] * 8)
        assert len(held) <= 3
    assert turn(held, [9] * 8 + [1]) == 8


def test_checkpoints_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CHECKPOINTS", 4)
    held = conversations(100_000)
    turn(held, list(range(40)), marks=range(1, 40))
    (resident,) = [held[slot] for slot in held.pool]
    assert len(resident.checkpoints) == 4
    assert max(resident.checkpoints) == 40


def test_what_is_dropped_was_zeroed():
    held = conversations(100_000)
    turn(held, list(range(40)), tenant=b"a", marks=[20])
    resident = held[next(iter(held.pool))]
    tensors = [*resident.state.rows(0, 40), *resident.state.fixed()]
    tensors += [t for checkpoint in resident.checkpoints.values() for t in checkpoint.tensors]
    assert any(tensor.count_nonzero() for tensor in tensors)
    held.forget()
    context = resident.state.context_ids
    assert all(not tensor.count_nonzero() for tensor in tensors if tensor is not context)
    assert context.tolist() == [SHAPE.context_fill] * 2
    assert held.pool.reserved_bytes == 0


def test_growing_zeroes_what_it_leaves():
    held = conversations(100_000)
    begun = held.begin([1] * 64, 200, b"")
    feed(held, begun.slot, [1] * 64)
    old = held.pool[begun.slot].attention[1].keys
    feed(held, begun.slot, [1] * 100)
    assert not old.count_nonzero()


def test_an_unknown_slot_is_refused():
    with pytest.raises(UnknownSlot):
        conversations().end(3)


def really_taken(held):
    """Bytes of all that is held, by another way than the pool's."""
    pool, memory = held.pool, held.pool._memory
    unique = {id(c): c for slot in pool for c in held[slot].checkpoints.values()}
    beside = sum(tensor.nbytes for c in unique.values() for tensor in c.tensors)
    if memory is None:
        return beside + sum(pool[slot].nbytes() for slot in pool)
    return beside + memory.taken_bytes + sum(pool[slot].shape.fixed_bytes() for slot in pool)


@pytest.mark.parametrize(("shape", "paged"), [(SHAPE, False), (WIDE, False), (WIDE, True)])
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(2, 8))
def test_whatever_happens_no_prefix_is_wrong_and_memory_is_bounded(shape, paged, seed, kept_tokens, slots):
    rng, held = np.random.default_rng(seed), conversations(kept_tokens, slots, shape, paged=paged)
    said = {b"a": [[]], b"b": [[]]}  # what each tenant's conversations have said
    for _ in range(12):
        tenant = (b"a", b"b")[rng.integers(2)]
        before = said[tenant][rng.integers(len(said[tenant]))]
        prompt = [*before[: rng.integers(len(before) + 1)], *rng.integers(0, 3, rng.integers(1, 12)).tolist()][:50]
        begun = held.begin(prompt, len(prompt) + 10, tenant)
        at = begun.cached_tokens
        assert at < len(prompt)
        assert same(held.pool[begun.slot], fresh(prompt[:at], shape))
        assert at == 0 or any(text[:at] == prompt[:at] for text in said[tenant])
        while at < len(prompt) and rng.random() < 0.9:
            end = min(len(prompt), at + int(rng.integers(1, 9)))
            if rng.random() < 0.1:
                read(held.pool[begun.slot], prompt[at:end], half=True)
                break
            feed(held, begun.slot, prompt[at:end])
            at = end
            if rng.random() < 0.5:
                held.checkpoint(begun.slot)
        answer = rng.integers(0, 3, rng.integers(0, 8)).tolist() if at == len(prompt) else []
        feed(held, begun.slot, answer, cut=1)
        held.end(begun.slot)
        said[tenant].append([*prompt[:at], *answer])
        assert held.pool.reserved_bytes <= held.pool.budget_bytes
        assert really_taken(held) <= held.pool.reserved_bytes
        assert len(held) == len(held.pool) <= slots
    for slot in held.pool:  # what waits is as it was, whatever its relatives have done
        assert same(held[slot].state, fresh(held[slot].ids.tolist(), shape))
    held.forget()
    assert held.pool.reserved_bytes == 0 == really_taken(held)


def test_branches_share_their_roots_pages_and_pay_once():
    plain, paged = (conversations(3000, shape=WIDE, paged=paged) for paged in (False, True))
    root = [n % 50 for n in range(48)]
    for held in (plain, paged):
        turn(held, root, [1], marks=[40])
        one = held.pool.reserved_bytes
        for number in range(4):
            assert turn(held, [*root, 60 + number, 3, 4], [5, 6]) == 48
        branches = held.pool.reserved_bytes - one
        if held is plain:
            copied = branches
    columns = 2 + 2 + 1 + 1 + 1 + 1 + 1 + 1
    assert branches < copied - 4 * (WIDE.growing_bytes(40) - columns * 2 * 4096)
    for slot in paged.pool:
        assert same(paged.pool[slot], fresh(paged[slot].ids.tolist(), WIDE))


@pytest.mark.parametrize("whose", ["root", "branch"])
def test_who_goes_back_behind_shared_pages_writes_over_nobodys(whose):
    held = conversations(3000, shape=WIDE, paged=True)
    root = [n % 50 for n in range(48)]
    turn(held, root, [1], marks=[16, 40])
    turn(held, [*root[:40], 7, 7, 7, 7, 7], [8, 8], marks=[42])
    (one,), (other,) = (
        [held[slot] for slot in held.pool if (held[slot].length == 49) is wanted]
        for wanted in ((True, False) if whose == "root" else (False, True))
    )
    assert held.pool._memory.saved_bytes > 0
    saved, reserved = held.pool._memory.saved_bytes, held.pool.reserved_bytes
    for later in [position for position in one.checkpoints if position > 16]:
        held._release(one, later)
    one.back_to(16)
    given_up = saved - held.pool._memory.saved_bytes
    assert given_up > 0
    assert held.pool.reserved_bytes <= reserved + given_up
    read(one.state, [33] * 30)
    assert same(one.state, fresh([*root[:16], *[33] * 30], WIDE))
    assert same(other.state, fresh(other.ids.tolist(), WIDE))


def test_the_same_state_is_the_same_to_the_test():
    assert same(fresh([1, 2, 3]), fresh([1, 2, 3]))
    assert not same(fresh([1, 2, 3]), fresh([2, 1, 3]))
    assert torch.equal(fresh([1]).context_ids, torch.tensor([7, 1]))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=6),
    st.lists(st.integers(1, CONTEXT - 1), max_size=12),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_one_that_visits_always_has_room_beside_one_of_full_length(earlier, marks, visitors):
    """What waits goes, then checkpoints; the one whose prompt is being read goes on as if nothing had been."""
    state_bytes = SHAPE.bytes(20)
    held = Conversations(StatePool(SHAPE, SHAPE.bytes(CONTEXT) + state_bytes, slots=64), Counters())
    most = SHAPE.tokens_in(state_bytes)
    for tokens, shared in earlier:
        turn(held, list(range(tokens)) if shared else [tokens] * tokens)
    long = list(range(100, 100 + CONTEXT))
    begun = held.begin(long, CONTEXT, b"")
    cuts = sorted({*marks, CONTEXT})
    for number, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        feed(held, begun.slot, long[start:end])
        held.checkpoint(begun.slot)
        if number < len(visitors):
            prompt = long[: visitors[number]] if number % 2 else [number] * visitors[number]
            visit = held.begin(prompt, most, b"")
            assert same(held.pool[visit.slot], fresh(prompt[: visit.cached_tokens]))
            feed(held, visit.slot, prompt[visit.cached_tokens :])
            held.end(visit.slot)
    assert same(held.pool[begun.slot], fresh(long))
    held.end(begun.slot)
