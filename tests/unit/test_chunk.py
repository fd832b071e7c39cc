"""How many prompt rows make a window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.chunk import SHARE, of_device, of_host

LEAST, MOST = limits.DEFAULT_PREFILL_CHUNK_ROWS, limits.MAX_PREFILL_CHUNK_ROWS


@pytest.mark.parametrize("rows", [1, 7, 8192])
def test_what_was_asked_for_is_taken(rows):
    assert of_host(rows).rows == of_device(rows, 0, 1 << 30).rows == rows


def test_a_cpu_lanes_default():
    assert of_host(None).rows == LEAST


def test_at_the_limit_and_past_it():
    row_bytes = 1000
    assert of_device(None, SHARE * 1024 * row_bytes, row_bytes).rows == 1024
    assert of_device(None, SHARE * 1024 * row_bytes - 1, row_bytes).rows == 512
    assert of_device(None, 1 << 60, row_bytes).rows == MOST
    assert of_device(None, -5, row_bytes).rows == LEAST


@given(st.integers(-(1 << 40), 1 << 40), st.integers(1, 1 << 20))
def test_the_largest_power_of_two_that_fits(free_bytes, row_bytes):
    chunk = of_device(None, free_bytes, row_bytes)
    assert LEAST <= chunk.rows <= MOST
    assert chunk.rows & (chunk.rows - 1) == 0
    fits = chunk.rows * row_bytes <= free_bytes // SHARE
    assert fits or chunk.rows == LEAST
    assert chunk.rows == MOST or 2 * chunk.rows * row_bytes > free_bytes // SHARE
    assert str(chunk.rows) in chunk.reason
    assert ("least" in chunk.reason) == (not fits)
