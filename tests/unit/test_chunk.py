"""How many prompt rows make a window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.chunk import SHARE, Layer, of_device, of_host, rows_that_fit

LEAST, MOST = limits.DEFAULT_PREFILL_CHUNK_ROWS, limits.MAX_PREFILL_CHUNK_ROWS
NEVER = Layer(1.0, 0.0)  # no chunk covers the link
ROW = 1000


@pytest.mark.parametrize("rows", [1, 7, 8192])
def test_what_was_asked_for_is_taken(rows):
    assert of_host(rows).rows == of_device(rows, 0, 1 << 30, NEVER).rows == rows


def test_a_cpu_lanes_default():
    assert of_host(None).rows == LEAST


def test_memory_at_the_limit_and_past_it():
    assert of_device(None, SHARE * 1024 * ROW, ROW, NEVER).rows == 1024
    assert of_device(None, SHARE * 1024 * ROW - 1, ROW, NEVER).rows == 512
    assert of_device(None, 1 << 60, ROW, NEVER).rows == MOST
    assert of_device(None, -5, ROW, NEVER).rows == LEAST


def test_the_link_at_the_limit_and_past_it():
    """A layer of 32 ms: 1,024 rows of 31.25 us cover it, just; a little faster products need twice as many."""
    found = of_device(None, 1 << 60, ROW, Layer(0.032, 0.032 / 1024))
    assert found.rows == 1024
    assert "32.0 ms for a layer, 1024 rows 32.0 ms" in found.reason
    assert of_device(None, 1 << 60, ROW, Layer(0.032, 0.0319 / 1024)).rows == 2048
    assert of_device(None, 1 << 60, ROW, Layer(0.0, 1e-6)).rows == LEAST, "everything is cached"
    held = of_device(None, SHARE * 512 * ROW, ROW, Layer(0.032, 0.032 / 1024))
    assert (held.rows, "512 rows 16.0 ms" in held.reason) == (512, True), "memory has the last word"


@given(st.integers(-(1 << 40), 1 << 40), st.integers(1, 1 << 20), st.floats(0, 1), st.floats(0, 1e-3))
def test_the_least_power_of_two_that_covers_or_the_largest_that_fits(free_bytes, row_bytes, stream_s, row_s):
    chunk, fits = of_device(None, free_bytes, row_bytes, Layer(stream_s, row_s)), rows_that_fit(free_bytes, row_bytes)
    assert LEAST <= chunk.rows <= fits <= MOST
    assert chunk.rows & (chunk.rows - 1) == 0
    inside = chunk.rows * row_bytes <= free_bytes // SHARE
    assert inside or chunk.rows == LEAST
    assert chunk.rows == fits or chunk.rows * row_s >= stream_s, "it is short of no memory"
    assert chunk.rows == LEAST or chunk.rows // 2 * row_s < stream_s, "half of it would not do"
    assert fits == MOST or 2 * fits * row_bytes > free_bytes // SHARE
    assert str(chunk.rows) in chunk.reason
    assert ("least" in chunk.reason) == (not inside)
