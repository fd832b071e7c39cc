"""Who must go to make room may stay until it is parked, while who comes has the seat: nobody waits for its parking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import limits
from shared_experts.park_server import ParkServer
from tests.fakes.device_lane import SeatedLane


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


LONG, SHORT = ids(180), ids(70, seed=1)


@pytest.fixture
def lane(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=512) as server:
        made = SeatedLane(server.path, 0, carried=True)
        yield made
        made.close()


def bounded(lane):
    pool = lane.held.pool
    residents = lane.held._residents.values()
    assert pool.lent_bytes == sum(one.lent_bytes for one in residents)
    assert pool.reserved_bytes <= pool.budget_bytes + pool.lent_bytes
    assert not any(one.busy and one.lent_bytes for one in residents)
    assert all(one.lent_bytes <= lane.held._held_bytes(one) for one in residents), "it is free once they are gone"
    seated = max((pool.bytes(one.state.capacity_tokens) for one in residents), default=0)
    assert pool.lent_bytes <= seated


def test_nobody_waits_for_the_parking_of_who_must_go(lane):
    lane.turn(LONG, [1])
    begun = lane.held.begin(SHORT, 80, b"")
    bounded(lane)
    assert lane.counters.parks == 0
    assert lane.held.pool.lent_bytes > 0
    lane.seat.take(lane.held.pool[begun.slot])
    while lane.held.background(1 << 12):
        bounded(lane)
    assert lane.counters.parks == 1
    assert lane.held.pool.lent_bytes == 0
    assert len(lane.held) == 1, "parked, it has gone"
    lane.held.end(begun.slot)
    assert lane.turn([*LONG, 1, 5], [6]) == 181
    assert lane.counters.restores == 1


def test_who_comes_back_meanwhile_goes_on_in_memory(lane):
    lane.turn(LONG, [1])
    lane.turn(SHORT, [2], beside=False)
    assert lane.held.pool.lent_bytes > 0
    assert lane.turn([*LONG, 1, 5], [6], beside=False) == 181
    assert (lane.counters.restores, lane.counters.parks) == (0, 0)
    bounded(lane)
    lane.settle()
    assert lane.held.pool.lent_bytes == 0
    assert lane.turn([*LONG, 1, 5, 6, 7], [8]) == 183


def test_what_is_lent_is_never_more_than_the_seat_leaves_free(lane):
    lane.turn(LONG, [1])
    lane.turn(SHORT, [2], beside=False)
    lane.turn(ids(70, seed=2), [3], beside=False)
    bounded(lane)
    assert lane.counters.parks >= 1, "the first had to be parked for the third"
    assert lane.turn([*LONG, 1, 5], [6]) == 181


def test_what_a_copy_shares_with_who_must_go_is_lent_no_longer(lane):
    """It does not become free when the other has gone."""
    lane.turn(SHORT, [1], marks=(20, 40), beside=False)
    lane.turn(ids(199, seed=3), [2], beside=False)
    assert lane.held.pool.lent_bytes > 0
    assert lane.turn([*SHORT[:50], 7, 8], [3], beside=False) == 40
    assert len(lane.held) == 2
    bounded(lane)
    lane.settle()
    assert lane.held.pool.lent_bytes == 0
    bounded(lane)


def test_without_a_pool_it_goes_at_once(tmp_path):
    lane = SeatedLane(tmp_path / "none.sock", 0, carried=True)
    lane.turn(LONG, [1])
    lane.turn(SHORT, [2])
    assert lane.held.pool.lent_bytes == 0
    assert lane.turn([*LONG, 1, 5], [6]) == 0
    lane.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=4, max_size=14))
@settings(max_examples=25, deadline=None)
def test_any_order_of_turns_stays_bounded_and_true(tmp_path_factory, turns):
    old, limits.PAGE_TOKENS = limits.PAGE_TOKENS, 16
    try:
        with ParkServer(tmp_path_factory.mktemp("p") / "park.sock", 4 << 20, segment_bytes=512) as server:
            lane = SeatedLane(server.path, 60, carried=True)
            talks = [ids(size, seed=size) for size in (160, 30, 75, 100)]
            for number, beside, settle in turns:
                known = lane.turn(talks[number], [1], marks=(20,), beside=beside)
                assert known >= len(talks[number]) - 2 or known == 0
                talks[number] += [1, 5]
                bounded(lane)
                if settle:
                    lane.settle()
                    assert lane.held.pool.lent_bytes == 0
            lane.close()
    finally:
        limits.PAGE_TOKENS = old
