"""Conversations between a seat and the pool: the same bytes, digests that see damage, threads that nobody waits for.

EXPRESSWAY_DAMAGES sets how many random damages are tried (1,000 by hand).
"""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import limits
from lanes.device import carrier as carriers
from lanes.device import pages
from lanes.device.pool_pins import PoolPins
from lanes.state import snapshot
from lanes.state.carrier import Fixed, Rows
from lanes.state.checkpoint import Checkpoint
from lanes.state.seat import Seat
from lanes.state.sequence import SequenceState
from shared_experts import park_digest
from shared_experts.errors import ParkRefused
from shared_experts.park_memory import ParkMemory
from shared_experts.park_server import ParkServer
from tests.fakes.device_lane import SeatedLane
from tests.fakes.states import SHAPE, WIDE, fresh, same

DAMAGES = int(os.environ.get("EXPRESSWAY_DAMAGES", "60"))
INT8 = replace(SHAPE.with_int8(), draft=None)
_ONE, _OTHER = SHAPE.attention.values()
ALIKE = replace(SHAPE, attention={1: _ONE, 2: _ONE, 3: _OTHER, 5: _ONE, 6: _ONE, 7: _ONE}, draft=None)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    monkeypatch.setattr(park_digest, "PIECE_BYTES", 300)  # parts of several pieces, no whole number of segments
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=512) as server:
        yield server


@pytest.fixture
def lane(pool):
    made = []

    def make(**options):
        made.append(SeatedLane(pool.path, carried=True, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


def parts_of(state, cuts, until):
    ranges = list(zip((0, *cuts), cuts, strict=False))
    sizes = snapshot.pages_bytes(state.shape, ranges)
    assert sizes == [snapshot.page_bytes(state.shape, *each) for each in ranges]
    rows = [Rows(state, *each, until, size) for each, size in zip(ranges, sizes, strict=True)]
    return [Fixed(tuple(state.fixed()), seated=True), *rows]


@given(
    st.sampled_from([SHAPE, WIDE, INT8, ALIKE]),
    st.booleans(),
    st.lists(st.sampled_from([1, 3, 8, 16, 16, 16]), min_size=1, max_size=6),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_what_is_gathered_is_what_is_packed_and_comes_back(shape, seated, lengths, fewer):
    cuts = np.cumsum(lengths).tolist()
    tokens = cuts[-1]
    until = max(tokens - fewer, cuts[-2] + 1 if len(cuts) > 1 else 1)
    state, other = (SequenceState(shape, tokens) for _ in range(2))
    if seated:
        for each in (state, other):
            Seat(shape, tokens + 5, "cpu").take(each)
    state.reserve(tokens)
    for tensor in (*state.rows(0, tokens), *state.fixed()):
        if tensor.numel():
            tensor.copy_(torch.randint(-100, 100, tensor.shape))
    parts = parts_of(state, cuts, until)
    packed = np.concatenate([snapshot.pack(part.tensors()) for part in parts])
    whole = [part for part in parts[1:] if part.end - part.first == 16 and part.first % 16 == 0]
    if seated and shape is ALIKE and whole:
        assert len(list(pages._views(torch.zeros(whole[0].size_bytes, dtype=torch.uint8), 0, whole[0], 1))) == 3 * 4
    memory = torch.zeros(packed.shape[0], dtype=torch.uint8)
    pages.gather(memory, parts)
    assert np.array_equal(memory.numpy(), packed)
    other.reserve(tokens)
    for tensor in other.rows(0, tokens):
        tensor.zero_()
    pool = ParkMemory.create(4096, 4096)
    pages.scatter(memory, parts_of(other, cuts, until), pool, [])
    pool.close()
    pairs = zip((*state.rows(0, until), *state.fixed()), (*other.rows(0, until), *other.fixed()), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert not any(tensor.any() for tensor in other.rows(until, tokens)), "nothing past the end"


def test_groups_keep_the_order_and_the_room(monkeypatch):
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    state = fresh(ids(64))
    items = [(rows, (rows.first,)) for rows in Rows.of(state, range(4), 64, 64)]
    size = items[0][0].size_bytes
    assert [len(group) for group in pages.groups(items, 3 * size)] == [3, 1]
    assert [len(group) for group in pages.groups(items, 3 * size - 1)] == [2, 2]
    assert [len(group) for group in pages.groups(items, 1)] == [1, 1, 1, 1]
    assert [item for group in pages.groups(items, 2 * size) for item in group] == items


def test_random_damages_are_refused_and_read_again(lane, pool):
    rng, prompt = np.random.default_rng(7), ids(100)
    a = lane()
    a.turn(prompt, [1], marks=(70,))
    a.settle()
    bytes_ = pool._memory._bytes
    used = pool.index.touched_segments * 512
    intact, refused = bytes_[:used].copy(), 0
    b = lane()
    for _ in range(DAMAGES):
        at, size = int(rng.integers(used)), int(rng.integers(1, 600))
        part = bytes_[at : min(used, at + size)]
        part[:] = rng.integers(0, 256, part.shape[0])
        before = b.counters.restores_refused
        begun = b.held.begin([*prompt, 1, 5], 120, b"")
        assert same(b.held.pool[begun.slot], fresh([*prompt, 1][: begun.cached_tokens]))
        assert (begun.cached_tokens == 101) == (b.counters.restores_refused == before)
        refused += b.counters.restores_refused - before
        b.held.end(begun.slot)
        bytes_[:used] = intact
        b.held.forget()
        b.park.close()  # what it refused it does not ask for again
    assert refused > DAMAGES // 3


def test_what_waits_in_memory_is_parked_beside_and_nobody_waits(lane, monkeypatch):
    a, b = lane(), lane()
    prompt = ids(100)
    a.turn(prompt, [1])
    a.turn(ids(30, seed=1), [2], beside=False)  # the first one left its seat
    gate, real = threading.Event(), carriers._by_hand
    monkeypatch.setattr(carriers, "_by_hand", lambda *given: (gate.wait(60), real(*given))[1])
    for _ in range(20):
        assert a.held.background(1 << 30), "there is more to do, and it came back at once"
    assert a.counters.parks == 0
    gate.set()
    while a.held.background(1 << 30):
        pass
    assert a.counters.parks == 1
    assert b.turn([*prompt, 1, 5], [6]) == 101


def test_a_conversation_that_goes_on_waits_for_no_more_than_what_runs(lane, pool, monkeypatch):
    a = lane()
    prompt = ids(180)
    a.turn(prompt, [1])
    a.turn(ids(30, seed=1), [2], beside=False)
    begun, gate, real, calls = threading.Event(), threading.Event(), carriers._by_hand, []

    def by_hand(*given):
        calls.append(1)
        begun.set()
        gate.wait(60)
        return real(*given)

    monkeypatch.setattr(carriers, "_by_hand", by_hand)
    assert a.held.background(1)
    assert begun.wait(60)
    wait = carriers.wait
    monkeypatch.setattr(carriers, "wait", lambda under, *limit: (gate.set(), wait(under, *limit))[1])
    assert a.turn([*prompt, 1, 4], [5], beside=False) == 181
    assert len(calls) == 1, "what had not begun never did"
    monkeypatch.setattr(carriers, "_by_hand", real)
    a.settle()
    assert a.counters.parks >= 1
    assert lane().turn([*prompt, 1, 4, 5, 6], [7]) == 183


def test_memory_that_the_owner_gave_back_is_registered_anew(lane, pool, monkeypatch):
    a, drops, real = lane(), [], PoolPins.drop
    monkeypatch.setattr(PoolPins, "drop", lambda self: (drops.append(len(a.driver.registered)), real(self)))
    a.turn(ids(100), [1])
    a.settle()
    assert a.driver.registered
    assert not drops
    while pool.index.evict():
        pass
    pool._punches += 1
    pool._memory.punch(pool.index.forget_fresh())
    a.turn(ids(120, seed=2), [3])
    a.settle()
    assert len(drops) == 1
    assert drops[0] > 0
    assert lane().turn([*ids(120, seed=2), 3, 4], [5]) == 121


def test_pieces_that_threads_take_are_the_names_that_every_lane_knows(lane, pool):
    """Parked from a seat, and from host memory; taken back by threads, and by a lane that has none."""
    a, prompt = lane(), ids(100)
    a.turn(prompt, [1], marks=(30,))
    a.settle()
    first = {blob.digest for entry in pool.index._by_change.values() for blob in entry.blobs()}
    sizes = [blob.size_bytes for entry in pool.index._by_change.values() for blob in entry.blobs()]
    assert max(sizes) > 3 * park_digest.PIECE_BYTES
    by_itself = SeatedLane(pool.path)
    for one in (lane(), by_itself):
        assert one.turn([*prompt, 1, 5], [6]) == 101
    while pool.index.evict():
        pass
    again = lane()
    again.turn(prompt, [1], marks=(30,), beside=False)
    again.turn(ids(30, seed=1), [2], beside=False)  # the first one left its seat
    again.settle()
    assert first <= {digest for _, digest in pool.index._blobs}
    while pool.index.evict():
        pass
    plain = SeatedLane(pool.path)
    plain.turn(prompt, [1], marks=(30,))
    plain.settle()
    assert first <= {digest for _, digest in pool.index._blobs}
    for one in (by_itself, plain):
        one.close()


def test_segments_of_another_tenant_are_zero(lane, pool):
    a = lane()
    a.turn(ids(150), [1], tenant=b"a")
    a.settle()
    touched = pool.index.touched_segments
    while pool.index.evict():
        pass
    client = a.park._connected()
    (segments,) = client.room(b"other tenant 16b", [touched * 512])
    assert not any(client.memory.segment(number).any() for number in segments)


def test_a_checkpoint_of_what_waits_takes_no_memory_and_never_changes(lane):
    a = lane()
    prompt = ids(60)
    a.turn(prompt, [1])
    a.turn(ids(30, seed=1), [2], beside=False)  # the first one left its seat
    resident = next(each for each in a.held._residents.values() if each.length == 61)
    a.arena.flush()
    free = a.arena.free_bytes
    first = Checkpoint.of(resident.state)
    assert free - a.arena.free_bytes < 4 * 512, "but for the few ids of its context"
    resident.checkpoints[60].into(resident.state)
    assert same(resident.state, fresh(prompt))
    second = Checkpoint.of(resident.state)
    resident.state.erase()
    for kept, truth in ((first, fresh([*prompt, 1])), (second, fresh(prompt))):
        state = SequenceState(SHAPE, 200)
        state.reserve(kept.position)
        kept.into(state)
        assert all(torch.equal(x, y) for x, y in zip(state.fixed(), truth.fixed(), strict=True))


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before anything else happens."""

    def submit(self, function, *given):
        done = Future()
        done.set_result(function(*given))
        return done


def test_all_that_is_read_of_segments_is_read_before_their_digests(lane, monkeypatch):
    a, b, order = lane(), lane(), []
    prompt = ids(100)
    a.turn(prompt, [1])
    a.settle()
    real, scatter = carriers._digest, pages.scatter
    monkeypatch.setattr(carriers, "_digest", lambda *given: (order.append("digest"), real(*given))[1])
    monkeypatch.setattr(pages, "scatter", lambda *given: (order.append("read"), scatter(*given)))
    monkeypatch.setattr(b.carrier, "_quick", AtOnce(1))
    assert b.turn([*prompt, 1, 5], [6]) == 101
    assert order[0] == "read"
    assert order[-1] == "digest"


def test_what_began_before_a_refusal_is_waited_for(lane, monkeypatch):
    a = lane()
    client = a.park._connected()
    (segments,) = client.room(b"t" * 16, [512])
    begun, gate, real, waited = threading.Event(), threading.Event(), carriers._by_hand, []
    monkeypatch.setattr(carriers, "_by_hand", lambda *given: (begun.set(), gate.wait(60), real(*given))[2])
    parts = [Fixed((torch.ones(256, dtype=torch.uint8),)) for _ in range(2)]
    with pytest.raises(ParkRefused, match="fewer segments"):
        a.carrier.out(client.memory, parts, [segments, ()], hurry=False)
    assert begun.wait(60)
    wait = carriers.wait
    monkeypatch.setattr(carriers, "wait", lambda under: (waited.append(len(under)), gate.set(), wait(under)))
    a.carrier.settle()
    assert waited == [1], "its segments are somebody else's from here on"


def test_threads_run_where_they_may_when_their_cores_are_gone(lane):
    a = lane()
    a.carrier._cores = {1 << 12}
    a.turn(ids(100), [1])
    a.settle()
    assert a.counters.parks == 1


def test_checkpoints_are_on_their_way_before_pages_and_beside_each_other(lane, monkeypatch):
    a, sent = lane(), []
    a.turn(ids(100), [1], marks=(30, 60), beside=False)
    real = a.carrier.out

    def out(memory, parts, places, *, hurry):
        sent.append(type(parts[0]))
        return real(memory, parts, places, hurry=hurry)

    monkeypatch.setattr(a.carrier, "out", out)
    gate, by_hand, begun = threading.Event(), carriers._by_hand, threading.Semaphore(0)
    monkeypatch.setattr(carriers, "_by_hand", lambda *given: (begun.release(), gate.wait(60), by_hand(*given))[2])
    for _ in range(20):
        assert a.held.idle(), "a step does not wait for what is under way"
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60), "two at once"
    gate.set()
    a.settle()
    assert a.counters.parks == 1
    assert sent[:4] == [Fixed] * 4, "three of the prompt, and where it ends"
    assert set(sent[4:-1]) == {Rows}
    assert sent[-1] is Fixed, "the header"
    assert lane().turn([*ids(100), 1, 5], [6]) == 101


def test_what_a_slow_thread_has_not_come_to_is_taken_by_quick_ones(lane):
    a = lane()
    a.turn(ids(100), [1], marks=(30, 60), beside=False)
    a.turn(ids(30, seed=1), [2], beside=False)  # the first one left its seat
    gate, busy = threading.Event(), threading.Event()
    a.carrier._slow.submit(lambda: (busy.set(), gate.wait(60)))
    assert busy.wait(60)
    for _ in range(5):
        assert a.held.background(1 << 30), "beside windows it waits for its thread"
    assert a.counters.parks == 0
    a.settle()
    assert a.counters.parks == 1, "once nothing runs, others do it"
    gate.set()
    assert lane().turn([*ids(100), 1, 5], [6]) == 101


def test_the_pool_is_taken_and_registered_before_it_is_needed(lane, monkeypatch):
    a, populated = lane(), []
    monkeypatch.setattr(ParkMemory, "populate", lambda self, offset, size: populated.append((offset, size)))
    a.park.ready()
    pieces = [(at, 4096) for at in range(0, 64 << 10, 4096)]
    assert populated == pieces, "as far ahead as it was told"
    at = a.park._client.memory.address
    assert [(address - at, size) for address, size, _ in a.driver.registered] == pieces
    a.turn(ids(100), [1])
    a.settle()
    assert a.counters.parks == 1


@pytest.mark.parametrize("work", ["_digest", "_by_hand"])
def test_a_thread_that_fails_costs_the_parking_and_not_the_lane(lane, monkeypatch, work):
    a, prompt = lane(), ids(100)
    a.turn(prompt, [1], beside=False)

    def broken(*given):
        raise MemoryError("a thread's")

    with monkeypatch.context() as patched:
        patched.setattr(carriers, work, broken)
        a.settle()
    assert a.counters.parks == 0
    a.park._retry_s = -1e9
    a.settle()
    assert a.counters.parks == 1
    b = lane()
    with monkeypatch.context() as patched:
        patched.setattr(carriers, "_digest", broken)
        assert b.turn([*prompt, 1, 5], [6]) == 0, "it is read"
    b.park._retry_s = -1e9
    assert b.counters.restores_refused == 1
    assert lane().turn([*prompt, 1, 5], [6]) == 101


def test_memory_is_taken_by_one_thread_at_a_time_and_none_outlives_the_pool(lane, monkeypatch):
    a, gate, begun, ended = lane(), threading.Event(), [], []

    def populate(self, offset, size):
        begun.append(offset)
        assert gate.wait(60)
        ended.append(offset)

    monkeypatch.setattr(ParkMemory, "populate", populate)
    a.park.poll()
    memory = a.park._client.memory
    assert a.carrier.look(memory)
    a.carrier._pins.cover(memory, 0, 4096)  # by a parking meanwhile
    for _ in range(3):
        assert a.carrier.look(memory), "there is more to do, later"
    assert begun == [0]
    wait = carriers.wait
    monkeypatch.setattr(carriers, "wait", lambda under, *limit: (gate.set(), wait(under, *limit))[1])
    a.park.close()
    assert begun == ended, "before the map goes"
    monkeypatch.setattr(carriers, "wait", wait)
    a.park._polled_s = -1e9
    while a.held.idle():  # another connection, another map
        pass
    assert ended[1:] == list(range(0, 64 << 10, 4096))


def test_a_lane_whose_owner_is_away_starts_all_the_same(tmp_path):
    a = SeatedLane(tmp_path / "none.sock", carried=True)
    a.park.ready()
    assert a.driver.registered == []
    a.close()
