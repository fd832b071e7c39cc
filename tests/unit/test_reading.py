"""How rows of a prompt are read: cases worked out by hand, and what holds for any numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes import limits
from lanes.experts.demand import chances, expected, hottest
from lanes.reading import MOST_WINDOWS, Asked, Pace, Preludes, Room, cheapest, costs, ring_slots, windows_up_to

# A record takes a millisecond of the link, half of that with the CPU's help.
PACE = Pace(
    link_bytes_per_s=1e9, miss_s=0.5e-3, window_s=8e-3, pass_s=100e-3, dense_row_s=10e-6, expert_row_s=20e-6
)  # fmt: skip
ROOM = Room(layers=10, record_bytes=10**6, ring_slots=8)


def near(cost, seconds, size):
    assert cost.seconds == pytest.approx(seconds)
    assert cost.link_bytes == pytest.approx(size)


def test_few_rows_by_hand():
    """8 rows: two windows of 8 ms and 100 misses between them, against a pass of 100 ms and 80 misses."""
    found = costs(Asked(8, missed=80, missed_by_windows=100, absent=1000), ROOM, PACE)
    near(found["windows"], 2 * 8e-3 + 100 * 0.5e-3, 100e6)
    near(found["chosen"], 100.08e-3 + 80e-3, 80e6)
    # A layer: 8 records begin of the 100 that are absent, 0.64 of them are chosen; 8 ms of them hide under 10 ms.
    near(found["ahead"], 100.08e-3 + 10 * (8 + 8 - 0.64 - 8) * 1e-3, 10 * (8 + 8 - 0.64) * 1e6)
    choice = cheapest(Asked(8, 80, 100, 1000), ROOM, PACE)
    assert choice.way == "windows"
    assert "windows 66.0 ms, 0.10 GB" in choice.reason


def test_many_rows_by_hand():
    """2,000 rows choose 980 of 1,000 absent experts; all that the ring takes comes under 12 ms of attention."""
    asked = Asked(2000, missed=980, missed_by_windows=20_000, absent=1000)
    found = costs(asked, ROOM, PACE)
    near(found["chosen"], 120e-3 + 980e-3, 980e6)
    crossing = 98 + 8 - 8 * 0.98
    near(found["ahead"], 120e-3 + 10 * (crossing - 8) * 1e-3, 10 * crossing * 1e6)
    assert cheapest(asked, ROOM, PACE).way == "ahead"
    larger = Room(10, 10**6, 100)  # the ring holds a layer, but attention covers 12 records only
    near(costs(asked, larger, PACE)["ahead"], 120e-3 + 10 * (100 - 12) * 1e-3, 1000e6)


def test_where_products_take_longer_than_the_link_copies_are_free():
    asked = Asked(100_000, missed=1000, missed_by_windows=1e6, absent=1000)
    found = costs(asked, ROOM, PACE)
    near(found["chosen"], 1.1 + 10 * 4e-3 + 2.0, 1e9)  # the ring has steps of 4 records
    near(found["ahead"], 1.1 + 2.0, 1e9)
    assert cheapest(asked, ROOM, PACE).way == "ahead"


def test_a_model_that_is_cached_whole():
    asked = Asked(40, 0, 0, 0)
    found = costs(asked, ROOM, PACE)
    near(found["windows"], 80e-3, 0)
    near(found["ahead"], 100.4e-3 + 0.8e-3, 0)
    assert cheapest(asked, ROOM, PACE).way == "windows"
    assert cheapest(asked, ROOM, PACE, ("chosen", "ahead")).way == "chosen"


def test_at_the_row_and_past_it():
    """A window costs 8 ms, a pass 100 and 0.03 a row: 12 windows are 96 ms, 13 are 104 against 101.56."""
    up_to, choice = windows_up_to(lambda rows: Asked(rows, 0, 0, 0), ROOM, PACE)
    assert up_to == 48
    assert choice.way == "chosen"
    assert choice.costs["windows"].seconds == pytest.approx(104e-3)


def test_windows_have_an_end():
    free = Pace(1e9, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert windows_up_to(lambda rows: Asked(rows, 0, 0, 0), ROOM, free)[0] == 4 * MOST_WINDOWS
    slow = Pace(1e9, 0.0, 9.0, 1.0, 0.0, 0.0)
    assert windows_up_to(lambda rows: Asked(rows, 0, 0, 0), ROOM, slow)[0] == 0


def test_the_ring_holds_what_attention_covers():
    assert ring_slots(2000, 10, 10**6, PACE) == 12 + 64
    assert ring_slots(0, 1000, 10**6, PACE) == 65
    assert ring_slots(10**9, 10, 10**6, PACE) == limits.MAX_RING_SLOTS
    assert ring_slots(0, 10, 10**6, Pace(1.0, 0, 0, 0, 0, 0)) == limits.RING_SLOTS


positive = st.floats(1e-9, 1e3)
paces = st.builds(Pace, st.floats(1e6, 1e12), positive, positive, positive, positive, positive)


@given(paces, st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1), st.integers(1, 512))
def test_a_pass_never_brings_less_than_it_needs_nor_ends_before(pace, rows, absent_share, missed_share, slots):
    room = Room(48, 2_764_800, slots)
    absent = absent_share * 48 * 512
    asked = Asked(rows, missed_share * absent, 4 * missed_share * absent, absent)
    found = costs(asked, room, pace)
    assert found["chosen"].link_bytes <= found["ahead"].link_bytes * (1 + 1e-9)
    assert found["ahead"].link_bytes <= asked.absent * room.record_bytes * (1 + 1e-9) + 1
    least = asked.missed * room.record_bytes / pace.link_bytes_per_s
    for way in ("chosen", "ahead"):
        assert found[way].seconds >= least * (1 - 1e-6)
        assert found[way].seconds >= (pace.pass_s + rows * (pace.dense_row_s + pace.expert_row_s)) * (1 - 1e-9)


def test_expected_experts_by_hand():
    even = chances(np.zeros((2, 10)), 2)
    assert even == pytest.approx(np.full((2, 10), 0.2))
    assert expected(even, 1).sum() == pytest.approx(4)
    assert expected(even, 2).sum() == pytest.approx(2 * 10 * (1 - 0.8**2))
    skewed = chances(np.array([[7.0, 1.0, 0.0, 0.0]]), 2)  # and half a use more for each: 7.5, 1.5, 0.5, 0.5
    assert skewed == pytest.approx(np.array([[1.0, 0.3, 0.1, 0.1]]))
    assert hottest(skewed, 3).tolist() == [[True, True, True, False]]
    assert hottest(even, 0).sum() == 0
    assert hottest(even, 99).all()


@given(st.integers(1, 4).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.floats(0, 1e6), min_size=4, max_size=9))))
def test_more_rows_choose_more(case):
    chosen, uses = case
    chance = chances(np.array([uses, uses[::-1]]), chosen)
    assert (chance > 0).all()
    assert (chance <= 1).all()
    counts = [expected(chance, rows).sum() for rows in (1, 4, 16, 1000)]
    assert counts == sorted(counts)
    assert counts[-1] <= chance.size


def test_the_ring_follows_what_was_measured_of_such_passes():
    preludes = Preludes()
    assert preludes.of(2000) is None
    preludes.told(2048, 8e-3)
    assert preludes.of(8192) == pytest.approx(32e-3), "two doublings"
    assert preludes.of(8191) == pytest.approx(8e-3 * 8191 / 2048)
    assert preludes.of(16384) is None
    preludes.told(8192, 9e-3)
    assert preludes.of(8192) == pytest.approx(9e-3)
    assert preludes.of(16384) == pytest.approx(18e-3)
    assert ring_slots(8192, 10, 10**6, PACE, preludes.of(8192)) == 9 + 64
    assert ring_slots(8192, 10, 10**6, PACE) == math.ceil(18.192) + 64
