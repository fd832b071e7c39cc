"""The native row ids against arrays: any tokens, constants and shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.models.qwen4_exp.row_ids import Hash, bound, row_id_array

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
MOST = 6


@st.composite
def cases(draw):
    order, heads = draw(st.integers(2, 5)), draw(st.integers(1, 9))
    number = (order - 1) * heads
    multipliers = draw(st.lists(INT64, min_size=order, max_size=order))
    sizes = draw(st.lists(st.integers(1, (1 << 63) - 1), min_size=number, max_size=number))
    offsets = draw(st.lists(st.integers(0, 1 << 62), min_size=number, max_size=number))
    eos = draw(INT64)
    tokens = draw(st.lists(st.one_of(st.just(eos), INT64), min_size=order - 1 + MOST, max_size=order - 1 + MOST))
    return heads, eos, Hash(*(np.array(each, np.int64) for each in (multipliers, sizes, offsets))), tokens


@settings(max_examples=300)
@given(cases(), st.integers(0, MOST))
def test_equal_to_arrays(case, rows):
    heads, eos, constants, tokens = case
    before, number = len(constants.multipliers) - 1, len(constants.sizes)
    said, out = np.zeros(before + MOST, np.int64), np.full((MOST, number), -7, np.int64)
    run = bound(said, eos, constants, heads, out)
    said[:] = tokens  # after it was bound
    run(rows)
    assert np.array_equal(out[:rows], row_id_array(said[: before + rows], eos, constants, heads))
    assert (out[rows:] == -7).all()


def test_the_released_sizes():
    random = np.random.default_rng(5)
    constants = Hash(
        random.integers(1, (1 << 63) // 248_320, 3), random.integers(19_000_000, 20_000_000, 16),
        np.arange(16) * 20_000_000,
    )  # fmt: skip
    said, out = np.zeros(2 + 4, np.int64), np.zeros((4, 16), np.int64)
    run = bound(said, 3, constants, 8, out)
    for _ in range(500):
        said[:] = random.integers(0, 248_320, 6)
        said[random.random(6) < 0.2] = 3
        run(4)
        assert np.array_equal(out, row_id_array(said, 3, constants, 8))


def test_what_the_library_would_read_beyond_is_refused():
    constants = Hash(np.ones(3, np.int64), np.ones(4, np.int64), np.zeros(4, np.int64))
    tokens, out = np.zeros(5, np.int64), np.zeros((3, 4), np.int64)
    bound(tokens, 0, constants, 2, out)(3)
    with pytest.raises(AssertionError):
        bound(tokens, 0, constants, 2, out)(4)
    for bad in (
        (tokens[:4], constants, out), (tokens, constants, out[:2]), (tokens, constants, out.astype(np.int32)),
        (tokens, constants._replace(sizes=np.ones(3, np.int64)), out),
        (tokens, constants._replace(sizes=np.zeros(4, np.int64)), out),
        (tokens, constants._replace(offsets=np.zeros(8, np.int64)[::2]), out),
        (np.zeros(10, np.int64)[::2], constants, out),
    ):  # fmt: skip
        said, hashed, to = bad
        with pytest.raises(AssertionError):
            bound(said, 0, hashed, 2, to)
