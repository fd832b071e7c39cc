"""Who must go to make room may stay until it is parked, while who comes has the seat: nobody waits for its parking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import limits
from shared_experts.park_server import ParkServer
from tests.fakes.device_lane import CONTEXT, SeatedLane
from tests.fakes.states import fresh, same
from tests.unit.test_conversations import feed


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


def by_turns(lane, prompts, rooms, beside=False):
    """Two generations, each of which has the seat for a step: the second one begins and ends within the first."""
    runs = []
    for prompt, room in zip(prompts, rooms, strict=True):
        begun = lane.held.begin(prompt, room, b"")
        state, at = lane.held.pool[begun.slot], begun.cached_tokens
        assert same(state, fresh(prompt[:at]))
        runs.append((begun, prompt, state))
        for end in (at + (len(prompt) - at) // 2, len(prompt)):
            lane.seat.take(state)
            if end > at and prompt is not prompts[0]:
                feed(lane.held, begun.slot, prompt[at:end])
                lane.held.checkpoint(begun.slot)
                at = end
    for begun, prompt, state in reversed(runs):
        lane.seat.take(state)
        feed(lane.held, begun.slot, [*prompt[state.length :], 1])
        if beside:
            lane.held.background(1 << 12)
        lane.held.end(begun.slot)
    return [begun.cached_tokens for begun, _, _ in runs]


@pytest.mark.parametrize(("kept", "back"), [(60, 20), (80, 40), (100, 50), (150, 40)])
def test_who_must_go_comes_back_to_a_checkpoint_beside_one_that_runs(tmp_path, monkeypatch, kept, back):
    """What it goes back to is not what makes room."""
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=512) as server:
        lane = SeatedLane(server.path, kept, carried=True)
        talk = ids(120, seed=5)
        lane.turn(talk, [1], marks=(20, 40, 50), beside=False)
        known = by_turns(lane, [ids(150, seed=6), [*talk[:back], 7, 7]], [CONTEXT, back + 8])
        assert known == [0, back]
        assert lane.turn([*talk[:back], 7, 7, 1, 8], [9]) == back + 3
        lane.settle()
        assert lane.turn([*talk, 1, 8], [9]) >= 120, "parked, before it went back"
        lane.close()


TURN = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2), st.booleans())


@given(st.lists(TURN, min_size=3, max_size=9), st.sampled_from([60, 100, 150]))
@settings(max_examples=25, deadline=None)
def test_two_by_turns_in_any_order_stay_true(tmp_path_factory, turns, kept):
    """As the engine lets them: the second one is no longer than what may wait."""
    old, limits.PAGE_TOKENS = limits.PAGE_TOKENS, 16
    try:
        with ParkServer(tmp_path_factory.mktemp("p") / "park.sock", 4 << 20, segment_bytes=512) as server:
            lane = SeatedLane(server.path, kept, carried=True)
            pool = lane.held.pool
            visitor = pool.tokens_in(pool.budget_bytes - pool.bytes(CONTEXT))
            talks = [ids(size, seed=size) for size in (150, 30, 75, 100, 60)]
            for one, other, edits, beside in turns:
                prompts = [talks[one], talks[other][: 25 * edits or None]][: 1 + (one != other)]
                prompts = [[*prompt[:170], 5 + edits] for prompt in prompts]
                rooms = [len(prompt) + 4 for prompt in prompts]
                if rooms[-1] > visitor:
                    prompts, rooms = prompts[:1], rooms[:1]
                by_turns(lane, prompts, rooms, beside)
                for number, prompt in zip((one, other), prompts, strict=False):
                    talks[number] = [*prompt, 1]
                assert not any(resident.busy for resident in lane.held._residents.values())
                lane.settle()
                assert pool.lent_bytes == 0
                assert pool.reserved_bytes <= pool.budget_bytes
            lane.close()
    finally:
        limits.PAGE_TOKENS = old


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
