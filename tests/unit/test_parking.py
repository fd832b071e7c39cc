"""Parking and taking back, over a real pool and real states: bit for bit, or not at all.

EXPRESSWAY_DAMAGES sets how many random damages are tried (1,000 by hand).
"""

import os

import numpy as np
import pytest

from lanes import limits
from lanes.counters import Counters
from lanes.state.conversations import Conversations
from lanes.state.parking import Parking
from lanes.state.pool import StatePool
from lanes.state.prefixes import Place
from lanes.state.snapshot import Identity
from shared_experts.layout import align
from shared_experts.park_client import ParkClient
from shared_experts.park_server import ParkServer
from tests.fakes.states import SHAPE, fresh, same
from tests.unit.test_conversations import feed, turn

DAMAGES = int(os.environ.get("EXPRESSWAY_DAMAGES", "60"))
SEGMENT = 512
IDENTITY = Identity.of(b"f" * 32, SHAPE)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)


@pytest.fixture
def pool(tmp_path):
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=SEGMENT) as server:
        yield server


@pytest.fixture
def clock():
    return Clock()


def lane_on(path, clock=None, identity=IDENTITY, kept_tokens=10_000):
    """A lane's conversations, with a pool."""
    counters = Counters()
    park = Parking(path, identity, counters, clock=clock or Clock())
    states = StatePool(SHAPE, SHAPE.bytes(200) + kept_tokens * 200)
    held = Conversations(states, counters, park)
    held.counters, held.park = counters, park
    return held


@pytest.fixture
def lane(pool, clock):
    made = []

    def make(identity=IDENTITY, kept_tokens=10_000):
        held = lane_on(pool.path, clock, identity, kept_tokens)
        made.append(held.park)
        return held

    yield make
    for park in made:
        park.close()


def settle(held):
    for _ in range(10_000):
        if not held.idle():
            return
    raise AssertionError("never idle")


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def test_parked_on_one_lane_and_resumed_on_another(lane):
    a, b = lane(), lane()
    prompt = ids(100)
    turn(a, prompt, [1, 2, 3], marks=[40])
    settle(a)
    assert a.counters.parks == 1
    following = [*prompt, 1, 2, 3, 9]
    assert turn(b, following) == 103
    assert b.counters.restores == 1
    branch = [*prompt[:40], 7, 7]
    assert turn(lane(), branch) == 0, "less than a block is not worth it"
    branch = [*prompt[:100], 7, 7]
    assert turn(lane(), branch) == 100


def test_begun_says_what_came_from_the_pool(lane):
    a, b = lane(), lane()
    prompt = ids(100)
    turn(a, prompt)
    settle(a)
    begun = b.begin([*prompt, 5], 120, b"")
    assert (begun.cached_tokens, begun.restored_tokens) == (100, 100)
    assert same(b.pool[begun.slot], fresh(prompt))
    b.end(begun.slot)


def test_a_pool_that_others_fill_costs_no_more_than_the_parking(lane, pool, clock):
    """The connection stays, what is there is taken back meanwhile, and it is tried again later."""
    a, b = lane(), lane()
    prompt = ids(100)
    turn(a, prompt)
    settle(a)
    client, other = b.park._connected(), ParkClient(pool.path)
    free = pool.index.segments - pool.index.used_segments
    other.room(b"o" * 16, [(free - 2) * SEGMENT])
    other.pin(1, next(iter(pool.index._by_change.values())).tenant)
    turn(b, ids(150, seed=3))
    clock.now_s += 1
    settle(b)
    assert b.counters.parks == 0
    assert b.park._client is client
    assert pool.index.used_segments == pool.index.segments - 2, "what it had leased is free"
    assert turn(b, [*prompt, 5]) == 100
    assert b.counters.restores == 1
    other.close()
    settle(b)
    assert b.counters.parks == 0, "not at once"
    clock.now_s += limits.PARK_RETRY_S + 1
    settle(b)
    assert b.counters.parks == 2


def test_unchanged_pages_are_not_copied_again(lane):
    a, b = lane(), lane()
    prompt = ids(160)
    turn(a, prompt)
    settle(a)
    first = a.counters.park_bytes
    turn(a, [*prompt, 5, 6])
    settle(a)
    again = a.counters.park_bytes - first
    page = SHAPE.growing_bytes(16)
    assert again <= 2 * SHAPE.fixed_bytes() + 2 * page + 2000, "two checkpoints, the open page and a header"
    turn(b, [*prompt, 5, 6, 7])
    settle(b)
    assert b.counters.park_bytes <= 2 * SHAPE.fixed_bytes() + 2 * page + 2000


def test_the_pool_offers_what_a_restored_conversation_had(lane):
    a, b, c = lane(), lane(), lane()
    prompt = ids(160)
    turn(a, prompt, marks=[80])
    settle(a)
    a.park.close()
    turn(b, [*prompt, 5, 6])
    settle(b)
    entry = list(b.park.mirror._entries.values())[-1]
    assert [tokens for tokens, _ in entry.marks] == [80, 160, 162]
    assert turn(c, [*prompt[:80], 3, 3]) == 80


def test_what_gives_way_is_parked_first(lane, pool):
    a = lane(kept_tokens=0)
    prompt = ids(150)
    turn(a, prompt)
    turn(a, ids(180, seed=1))
    assert a.counters.parks == 1
    assert turn(a, [*prompt, 4]) == 150
    assert a.counters.restores == 1


def test_prefixes_tell_what_is_parked(lane):
    a, b = lane(), lane()
    prompt = ids(130)
    turn(a, prompt)
    assert {place for n in a.log.after(None) for _, place in n.added} == {Place.LIVE}
    settle(a)
    settle(b)
    (news,) = b.log.after(None)
    assert [(key[1], place) for key, place in news.added] == [(130, Place.PARKED)]
    turn(b, [*prompt, 1])
    assert [place for _, place in b.log.after(None)[0].added] == [Place.PARKED, Place.LIVE]


def test_only_within_a_tenant(lane):
    a, b = lane(), lane()
    prompt = ids(100)
    turn(a, prompt, tenant=b"a")
    settle(a)
    assert turn(b, [*prompt, 1], tenant=b"b") == 0
    assert turn(b, [*prompt, 1], tenant=b"a") == 100


@pytest.mark.parametrize("identity", [Identity.of(b"g" * 32, SHAPE), Identity(b"f" * 32, b"l" * 16)])
def test_another_models_state_is_refused(lane, identity):
    a, b = lane(), lane(identity)
    prompt = ids(100)
    turn(a, prompt)
    settle(a)
    assert turn(b, [*prompt, 1]) == 0
    assert b.counters.restores_refused == 1


def test_a_conversation_that_goes_on_is_not_parked_half_way(lane):
    a = lane()
    prompt = ids(200)
    turn(a, prompt[:150])
    a.background(1)  # begun
    assert turn(a, prompt) == 150
    settle(a)
    assert turn(lane(), [*prompt, 1]) == 200


def test_without_an_owner_the_lane_works_on(lane, pool):
    a = lane()
    turn(a, ids(100))
    pool.close()
    settle(a)
    assert turn(a, [*ids(100), 1]) == 100
    assert a.counters.parks == 0


def test_a_new_owner_begins_with_an_empty_pool(lane, clock, pool, tmp_path):
    a, b = lane(), lane()
    turn(a, ids(100))
    settle(a)
    turn(b, [*ids(100), 1])
    pool.close()
    with ParkServer(tmp_path / "park.sock", 1 << 20, segment_bytes=SEGMENT):
        clock.now_s += limits.PARK_POLL_S
        settle(a)  # the connection breaks
        assert len(a.park.mirror) == 0
        clock.now_s += limits.PARK_RETRY_S
        settle(a)
        assert a.counters.parks == 2, "what waits in a lane is parked again"
        assert turn(lane(), [*ids(100), 3]) == 100


@pytest.mark.parametrize(("extra_bytes", "places"), [(0, 1), (-16, 0), (SHAPE.fixed_bytes(), 2), (1 << 20, 4)])
def test_of_a_small_pool_it_takes_the_end_first_and_nothing_where_it_is_too_large(tmp_path, extra_bytes, places):
    """Whoever is too large for the pool would drive out everybody else, and fail."""
    needed_bytes = SHAPE.growing_bytes(200) + SHAPE.fixed_bytes() + extra_bytes
    with ParkServer(tmp_path / "small.sock", align(-(-needed_bytes * 8 // 7), 8), segment_bytes=8) as server:
        park = Parking(server.path, IDENTITY, Counters(), clock=Clock())
        held = Conversations(StatePool(SHAPE, SHAPE.bytes(4000)), Counters(), park)
        park.poll()
        begun = turn(held, ids(200), marks=(50, 100, 150))
        settle(held)
        assert begun == 0
        told = [len(entry.marks) for entry in server.index.changes(0).entries]
        assert told == ([places] if places else [])
        park.close()


def test_a_pool_without_room_is_left_alone(tmp_path):
    with ParkServer(tmp_path / "small.sock", 8 * SEGMENT, segment_bytes=SEGMENT) as server:
        counters = Counters()
        park = Parking(server.path, IDENTITY, counters, clock=Clock())
        held = Conversations(StatePool(SHAPE, SHAPE.bytes(4000)), counters, park)
        turn(held, ids(200))
        settle(held)
        assert counters.parks == 0
        assert turn(held, [*ids(200), 1]) == 200
        park.close()
        while server.index.used_segments:
            pass  # the owner has not seen yet that the connection ended


def test_random_damages_are_refused_and_read_again(lane, pool):
    rng = np.random.default_rng(5)
    a = lane()
    prompt = ids(100)
    turn(a, prompt, marks=[70])
    settle(a)
    bytes_ = pool._memory._bytes
    used = pool.index.touched_segments * SEGMENT
    intact = bytes_[:used].copy()
    refused = harmless = 0
    for number in range(DAMAGES):
        kind = number % 4
        at = int(rng.integers(used))
        size = int(rng.integers(1, 600))
        if kind == 0:
            bytes_[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            bytes_[at : min(used, at + size)] = 0  # cut short
        elif kind == 2:
            part = bytes_[at : min(used, at + size)]
            part[:] = rng.integers(0, 256, part.shape[0])
        else:
            other = int(rng.integers(used))
            length = min(size, used - at, used - other)
            bytes_[at : at + length] = intact[other : other + length]  # another place's bytes
        b = lane(kept_tokens=100)
        begun = b.begin([*prompt, 5], 120, b"")
        assert same(b.pool[begun.slot], fresh(prompt[: begun.cached_tokens]))
        refused += b.counters.restores_refused
        harmless += begun.cached_tokens == 100
        assert (begun.cached_tokens == 100) == (b.counters.restores_refused == 0)
        b.end(begun.slot)
        b.park.close()
        bytes_[:used] = intact
    assert refused + harmless == DAMAGES
    assert refused > DAMAGES // 2
    print(f"\n{DAMAGES} damages: {refused} refused, {harmless} in bytes that nothing reads")


def test_memory_stays_inside_over_many_conversations(lane, pool):
    held = lane(kept_tokens=300)
    for number in range(150):
        turn(held, ids(70 + number % 40, seed=number % 120) + [number] * (number >= 120))
        assert held.pool.reserved_bytes <= held.pool.budget_bytes
        assert pool.index.used_segments <= pool.index.segments
    settle(held)
    assert held.counters.restores > 0


def test_segments_are_zeroed_for_another_tenant(lane, pool, tmp_path):
    a = lane()
    turn(a, ids(200), tenant=b"a")
    settle(a)
    touched = pool.index.touched_segments
    while pool.index.evict():
        pass
    client = lane().park._connected()
    (segments,) = client.lease(b"other tenant 16b", [(b"d" * 16, touched * SEGMENT)])
    assert not any(client.memory.segment(number).any() for number in segments)
    client.close()
    assert feed is not None


def test_checkpoints_that_only_the_pool_has_are_bounded(lane, monkeypatch):
    monkeypatch.setattr(limits, "MOST_INHERITED", 2)
    a, b = lane(), lane()
    prompt = ids(160)
    turn(a, prompt, marks=[70, 80, 90, 100, 110])
    settle(a)
    turn(b, [*prompt, 5])
    settle(b)
    entry = list(b.park.mirror._entries.values())[-1]
    assert [tokens for tokens, _ in entry.marks] == [70, 110, 160, 161], "the first and the last two"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_header_over_the_limit_is_not_read(lane, monkeypatch, missing):
    a, b = lane(), lane()
    prompt = ids(100)
    turn(a, prompt)
    settle(a)
    (entry,) = a.park.mirror._entries.values()
    size = a.park._client.pin(entry.number, entry.tenant)[1]
    monkeypatch.setattr(limits, "MOST_HEADER_BYTES", size - missing)
    assert turn(b, [*prompt, 5]) == (0 if missing else 100)
