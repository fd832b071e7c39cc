"""What of a prompt is known and where checkpoints go: the pure part."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lanes.state.reuse import common_prefix, least_missed, marks, most_useful, parts

IDS = st.lists(st.integers(0, 2), max_size=20)


@given(IDS, IDS)
def test_a_common_prefix_is_compared_token_by_token(a, b):
    plain = 0
    while plain < min(len(a), len(b)) and a[plain] == b[plain]:
        plain += 1
    assert common_prefix(np.array(a, np.uint32), np.array(b, np.uint32)) == plain


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 70), st.lists(st.integers(-5, 700), max_size=8))
def test_parts_cover_the_prompt_and_end_at_every_mark(start, more, chunk, where):
    end = start + more
    found = parts(start, end, chunk, where)
    assert [p.start for p in found] == [start, *(p.end for p in found[:-1])]
    assert found[-1].end == end
    assert all(1 <= p.end - p.start <= chunk for p in found)
    assert {p.end for p in found if p.mark} == {w for w in where if start < w < end} | {end}


@given(st.integers(1, 60_000), st.lists(st.integers(0, 70_000), max_size=64))
def test_marks_are_inside_apart_and_regular(tokens, hints):
    found = marks(tokens, hints, 4096, 256)
    assert found == sorted(set(found))
    assert all(0 < mark < tokens for mark in found)
    inside = sorted({hint for hint in hints if 0 < hint < tokens})
    if inside:
        assert inside[0] in found
        assert inside[-1] in found
    gaps = np.diff([0, *found, tokens])
    assert gaps.max() <= 4096 + 1024 + 4096 // 4, "nowhere is much more than 4,096 tokens without a checkpoint"
    assert len(found) <= tokens // 256 + 3


def test_marks_by_hand():
    assert marks(10_000, [], 4096, 256) == [4096, 8192]
    assert marks(4096, [], 4096, 256) == []
    assert marks(10_000, [4000, 9000], 4096, 256) == [4000, 9000]
    assert marks(3000, [100, 120, 300, 310, 2000], 4096, 256) == [100, 310, 2000]


def test_the_checkpoint_that_saves_least_gives_way():
    assert least_missed([4096, 8192, 8200, 12288]) == 8200
    assert least_missed([25_000, 26_000, 27_500]) == 26_000
    assert least_missed([5]) == 5


def test_what_is_most_useful_keeps_the_last_and_what_is_far_apart():
    positions = [4096, 8192, 8200, 12288, 12300]
    assert most_useful(reversed(positions), 9) == positions
    assert most_useful(positions, 4) == [4096, 8192, 12288, 12300]
    assert most_useful(positions, 2) == [8192, 12300]
    assert most_useful(positions, 1) == most_useful(positions, 0) == [12300]
