"""Conversations of lanes whose running one lies in a seat: kept, parked and taken back like any others, bit for bit."""

import numpy as np
import pytest

from lanes import limits
from shared_experts import park_digest
from shared_experts.park_server import ParkServer
from tests.fakes.device_lane import CONTEXT, SeatedLane
from tests.fakes.late_host import LateHost
from tests.fakes.states import read

MADE = {
    "plain": lambda path: SeatedLane(path),
    "late": lambda path: SeatedLane(path, host=LateHost()),
    "device": lambda path: SeatedLane(path, carried=True),
    "device without room": lambda path: SeatedLane(path, carried=True, arena_bytes=4096),
}


@pytest.fixture(params=MADE)
def lanes(tmp_path, monkeypatch, request):
    """As on a CPU; with copies that come as late as they may; as on a GPU, played on the CPU."""
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    monkeypatch.setattr(park_digest, "PIECE_BYTES", 300)
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=512) as server:
        made = [MADE[request.param](server.path) for _ in range(2)]
        yield made
        for lane in made:
            lane.close()


def ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, 1000, count).tolist()


def test_parked_in_its_seat_and_resumed_in_another_lanes(lanes):
    a, b = lanes
    prompt = ids(np.random.default_rng(0), 100)
    a.turn(prompt, [1, 2, 3])
    occupant = a.seat.occupant
    a.settle()
    assert a.counters.parks == 1
    assert a.seat.occupant is occupant, "parking takes nobody's place"
    assert b.turn([*prompt, 1, 2, 3, 9], [4]) == 103
    assert b.counters.restores == 1


def test_what_a_branch_does_in_the_seat_leaves_its_root_alone(lanes):
    a, _ = lanes
    prompt = ids(np.random.default_rng(1), 120)
    a.turn(prompt, [1], marks=(60,))
    assert a.turn([*prompt[:60], 7, 7], [2]) == 60
    assert a.turn([*prompt, 1, 5], [3]) == 121


def test_many_turns_of_many_conversations_on_two_lanes(lanes):
    """Some wait in memory, some only in the pool, some were cut back; nobody ever begins with a wrong state."""
    rng, known = np.random.default_rng(2), 0
    talks = [ids(rng, 70) for _ in range(5)]
    for _ in range(50):
        number, lane = int(rng.integers(0, len(talks))), lanes[int(rng.integers(0, 2))]
        answer = ids(rng, 3)
        known += lane.turn(talks[number], answer, marks=(int(rng.integers(1, 70)),))
        talks[number] += [*answer, *ids(rng, 2)]
        if len(talks[number]) > CONTEXT - 10:
            talks[number] = ids(rng, 70)
        if rng.random() < 0.7:
            lane.settle()
    assert known > 50 * 30
    assert [lane.counters.restores_refused for lane in lanes] == [0, 0]
    assert sum(lane.counters.restores for lane in lanes) > 0


def test_a_pass_that_was_left_in_the_seat_is_not_parked(lanes):
    a, b = lanes
    prompt = ids(np.random.default_rng(3), 100)
    a.turn(prompt, [1, 2])
    begun = a.held.begin([*prompt, 1, 2, *ids(np.random.default_rng(4), 60)], 180, b"")
    state = a.held.pool[begun.slot]
    a.seat.take(state)
    read(state, [5, 6], half=True)
    a.held.end(begun.slot)
    a.settle()
    assert b.turn([*prompt, 1, 2, 9], [4]) in (100, 102)
