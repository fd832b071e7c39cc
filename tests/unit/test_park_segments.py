"""Free segments of the pool: each in one run or used, and a part gets neighbours where there are any."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_experts.park_segments import FreeSegments


def runs(numbers):
    return 1 + sum(b - a != 1 for a, b in itertools.pairwise(numbers))


def test_the_smallest_run_that_has_room_is_taken():
    free = FreeSegments(40)
    taken = [free.take(count, 40) for count in (5, 1, 3, 1, 9, 1, 20)]
    assert free.take(1, 40) is None
    for number in (0, 2, 4):
        free.give(taken[number])
    assert free.take(3, 0) == taken[2]
    assert free.take(4, 0) == taken[0][:4]
    assert free.take(10, 0) == (*taken[4], taken[0][4]), "the largest where none is large enough"
    assert free.take(1, 0) is None


def test_what_was_never_used_comes_last_and_only_as_far_as_it_may():
    free = FreeSegments(10)
    free.give(free.take(4, 10))
    assert free.take(7, 2) is None
    assert free.take(6, 2) == (0, 1, 2, 3, 4, 5)
    assert (free.touched, free.free) == (6, 0)
    assert free.take(0, 0) == ()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 9)), max_size=60), st.integers(1, 60))
def test_every_segment_is_used_once_or_free(turns, segments):
    """Against a set of numbers."""
    free, used, touched = FreeSegments(segments), [], 0
    for what, count, which in turns:
        if what == 0 and used:
            free.give(used.pop(which % len(used)))
        elif what == 1 and which < 2:
            given_back = free.forget_fresh()
            assert given_back == list(range(touched - 1, touched - 1 - len(given_back), -1))
            touched -= len(given_back)
        else:
            there = {n for n in range(segments) if n >= touched or not any(n in each for each in used)}
            fresh = which * 4
            usable = {n for n in there if n < touched + fresh}
            taken = free.take(count, fresh)
            assert (taken is None) == (len(usable) < count)
            if taken is not None:
                assert len(set(taken)) == len(taken) == count
                assert set(taken) <= usable
                used.append(taken)
                touched = max(touched, max(taken) + 1)
        held = set(itertools.chain(*used))
        assert free.touched == touched
        assert [n for n in range(segments) if n in free] == [n for n in range(touched) if n not in held]
        assert free.free == touched - len(held)


@pytest.mark.parametrize("marks", [1, 6])
def test_a_full_pool_that_turns_over_comes_to_be_in_no_more_pieces(marks):
    """As conversations of 25,000 tokens of the true model ask: 98 pages of 29 segments, checkpoints of 451."""
    free, held, pieces = FreeSegments(10_000), [], []
    for turn in range(30):
        parts = [29] * 98 + [451] * (marks if turn % 2 else 1) + [1]
        while free.free + free.segments - free.touched < sum(parts):
            for part in held.pop(0):
                free.give(part)
        held.append([free.take(part, 10_000) for part in parts])
        pieces.append(sum(map(runs, held[-1])) - len(parts))
    assert max(pieces) <= 12
