"""Windows of many rows on a GPU lane's experts, in Triton's interpreter: bits, the ring's copies, slots given back."""

import ctypes
import weakref

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lanes import limits
from lanes.counters import Counters
from lanes.experts.gpu import slots
from lanes.experts.gpu.slots import runs
from lanes.experts.policy import Touched
from lanes.experts.store import Interrupted
from lanes.kernels import grouped
from lanes.models.near import Near
from tests.fakes.gpu_experts import Rig
from tests.fakes.spare_slots import with_spare

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu"),
    pytest.mark.usefixtures("unwritten"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(grouped, "BLOCK_ROWS", 16)
    monkeypatch.setattr(grouped, "ADD_COLUMNS", 32)


def small(slots):
    return Rig(slots=slots, hidden=32, inner=32, layers=2, experts=4, chosen=1)


def whole(cache, slots):
    """No slot is lost or owned twice."""
    assert cache.room == slots
    assert sorted([*cache._free, *(s for s in cache.slots().tolist() if s >= 0)]) == list(range(slots))


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(("slots", "ring"), [(0, 0), (8, 1), (24, 4)])
def test_every_bit_whatever_the_ring(slots, ring, prompt, monkeypatch):
    monkeypatch.setattr("lanes.experts.gpu.prompt.RING_SHARE", 8 if slots < 24 else 2)
    rig = small(slots)
    fetched, fetch = [], rig.cache.fetch
    monkeypatch.setattr(rig.cache, "fetch", lambda copies, after: (fetched.extend(copies), fetch(copies, after))[1])
    rig.window(1, 5, prompt=prompt)
    assert bool(fetched) == bool(ring)
    assert len({slot for _, slot in fetched}) <= ring
    whole(rig.cache, min(slots, 8))
    counters = rig.counters
    assert counters.streamed_bytes == len(fetched) * rig.region.info.record_bytes
    assert counters.stream_wait_ns == counters.streaming_ns, "a processor that copies does nothing else"
    assert (counters.streaming_ns > 0) == bool(ring)
    if not prompt and ring:
        assert counters.streamed_bytes == counters.expert_miss_bytes, "what was chosen and no more"
    rig.window(2, 5, layers=1, prompt=prompt)  # after the cache has turned over, and left before the last layer


class Seen(TorchFunctionMode):
    """Calls that would copy between host and device, or wait for it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, moves = getattr(function, "__name__", ""), {torch.device, str}
        if name in ("tensor", "as_tensor", "cpu", "cuda", "item", "tolist", "__bool__", "__int__", "nonzero"):
            self.calls.append(name)
        if name == "to" and (moves & {type(a) for a in args} or "device" in (kwargs or {})):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def test_a_layer_copies_nothing_on_the_computing_stream():
    """There it would wait for the records on the link, and every step with it."""
    rig = small(8)
    x, ids, weights = rig.choices(np.random.default_rng(1), 9)
    rig.experts.begin_prompt(9)
    with Seen() as seen:
        rig.experts.expect(0, ids)
        got = rig.experts.forward(0, x, ids, weights)
    assert seen.calls == []
    with seen:
        ids.to("cpu").tolist()
    assert seen.calls == ["to", "tolist"], "it would have been seen"
    assert torch.equal(got, rig.store.forward(0, x, ids, weights))
    rig.experts.end_window()
    rig.experts.settle()


def test_what_was_expected_and_did_not_come_changes_nothing():
    rig = small(8)
    x, ids, weights = rig.choices(np.random.default_rng(1), 9)
    other = (ids + 1) % 4
    rig.experts.expect(0, ids)
    assert torch.equal(rig.experts.forward(0, x, other, weights), rig.store.forward(0, x, other, weights))
    rig.experts.end_window()
    rig.experts.settle()
    assert rig.counters.expert_hits + rig.counters.expert_misses == 9


@pytest.mark.parametrize("rows", [4, 5])
def test_a_long_window_begins_to_copy_before_its_first_layer(rows):
    rig = small(8)
    rig.experts.begin_prompt(rows)
    assert (rig.cache.room < 8) == (rows > 4)
    rig.experts.end_window()
    rig.experts.settle()
    whole(rig.cache, 8)
    assert (rig.counters.streamed_bytes > 0) == (rows > 4)


def test_what_routing_is_told_is_what_the_device_reads():
    rig = small(8)
    rig.window(1, 1, layers=1)
    counters = Counters()
    ids, _ = Near(rig.experts.resident, counters).route(0, torch.randn(9, 4), 1, True)
    assert rig.cache.resident[0].sum() == 1
    assert rig.cache.resident[0][ids.numpy()].all()
    assert counters.prompt_choices == 9


def test_a_very_long_window_has_the_spare_slots_until_the_next_decode_window(monkeypatch):
    monkeypatch.setattr(limits, "PROMPT_ROWS_IN_PLACE", 6)
    rig = small(8)
    memory = with_spare(rig.cache, 5)
    rig.window(1, 6, prompt=True)
    assert memory.given == 0
    for seed in (2, 3):
        rig.window(seed, 7, prompt=True)
        assert (memory.given, rig.cache.room) == (1, 3)
    x, ids, weights = rig.choices(np.random.default_rng(4), 7)
    rig.experts.begin_prompt(7)
    rig.experts.forward(0, x, ids, weights)
    rig.experts.discard_window()  # cancelled
    assert rig.cache.room == 3
    rig.experts.begin_window(1)
    assert rig.cache.room == 8
    rig.experts.discard_window()
    whole(rig.cache, 8)
    rig.window(6, 7, prompt=True)
    assert memory.given == 2


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_cancelled_window_gives_its_slots_back(layers):
    rig = small(8)
    x, ids, weights = rig.choices(np.random.default_rng(1), 6)
    rig.experts.begin_prompt(6)
    for layer in range(layers):
        rig.experts.forward(layer, x, ids, weights)
    assert rig.cache.room < 8
    rig.experts.stopped = lambda: True
    with pytest.raises(Interrupted):
        rig.experts.forward(min(layers, 1), x, ids, weights)
    rig.experts.end_window()
    rig.experts.settle()
    whole(rig.cache, 8)
    rig.experts.stopped = lambda: False
    rig.window(2, 5, layers=1, prompt=True)  # and the next one finds nothing of it


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_an_error_in_the_middle_of_a_layer_gives_them_back_too(batch, monkeypatch):
    rig, calls, run = small(8), [], grouped.run

    def breaks(*args):
        calls.append(args)
        if len(calls) == 1 + batch:
            raise RuntimeError("no launch")
        run(*args)

    monkeypatch.setattr(grouped, "run", breaks)
    x, ids, weights = rig.choices(np.random.default_rng(1), 9)
    rig.experts.begin_prompt(9)
    with pytest.raises(RuntimeError, match="no launch"):
        rig.experts.forward(0, x, ids, weights)
    assert rig.cache.room < 8
    rig.experts.discard_window()
    whole(rig.cache, 8)


def test_an_expert_that_lost_its_slot_to_the_ring_is_read_where_it_lies():
    rig = small(8)
    rig.cache.turn(Touched(np.arange(8), np.ones(8, np.int64), 1))
    assert rig.cache.resident.all()
    x, ids, weights = rig.choices(np.random.default_rng(9), 6)
    rig.experts.forward(0, x, ids, weights)
    lost, *_ = np.argwhere(~rig.cache.resident)
    small_x, small_weights = x[:1], weights[:1]
    chosen = torch.tensor([[int(lost[1])]])
    got = rig.experts.forward(int(lost[0]), small_x, chosen, small_weights)
    assert torch.equal(got, rig.store.forward(int(lost[0]), small_x, chosen, small_weights))
    rig.experts.end_window()
    rig.experts.settle()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_neighbours_are_copied_in_one_call(copies):
    calls = list(runs([(slot, 100 * record) for slot, record in copies], 100))
    assert [(s + n, h + 100 * n) for s, h, count in calls for n in range(count)] == [(s, 100 * r) for s, r in copies]
    ends = [(slot + count, home + 100 * count) for slot, home, count in calls]
    assert all(end != call[:2] for end, call in zip(ends, calls[1:], strict=False)), "nothing more to join"


class Stub:
    """Of a stream, or of an event."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def wait_event(self, event):
        pass

    def record(self, stream):
        pass


@pytest.fixture
def copied(monkeypatch):
    """How many records each call of the driver copies; pieces are of 4."""
    monkeypatch.setattr(torch.cuda, "Stream", Stub)
    monkeypatch.setattr(torch.cuda, "Event", Stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(slots, "PIECE_SLOTS", 4)
    sizes = []

    def copy(to, source, size_bytes, stream):
        sizes.append(size_bytes // 512)
        ctypes.memmove(to, source, size_bytes)

    monkeypatch.setattr(slots.driver, "copy", copy)
    return sizes


def test_no_copy_goes_over_the_end_of_a_piece_of_memory(copied):
    source = torch.randint(0, 256, (15, 512), dtype=torch.uint8)
    made = slots.DeviceSlots(15, 512, torch.device("cpu"), spare=10)
    made.copy([(slot, source.data_ptr() + 512 * slot) for slot in range(15)], Stub())
    assert copied == [5, 4, 4, 2]
    for slot in range(15):
        assert ctypes.string_at(made.address(slot), 512) == bytes(source[slot].tolist())


def test_nor_over_the_end_of_the_piece_that_records_come_from(copied, monkeypatch):
    made = slots.DeviceSlots(20, 512, torch.device("cpu"), spare=8)
    both = torch.randint(0, 256, (8, 512), dtype=torch.uint8)  # two allocations may lie side by side
    monkeypatch.setattr(made, "_pieces", [both[:4].flatten(), both[4:].flatten()])
    made.copy([(slot, made.address(12 + slot)) for slot in range(8)], Stub())
    assert copied == [4, 4]
    assert ctypes.string_at(made.address(0), 8 * 512) == bytes(both.flatten().tolist())


def test_given_pieces_are_nobodys_and_share_a_segment_with_nobody(copied, monkeypatch):
    record_bytes, emptied = 3 << 20, []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(made._pieces) if made else None))
    made = None
    made = slots.DeviceSlots(7, record_bytes + 512, torch.device("cpu"), spare=5)
    assert emptied == [None], "nothing that was left behind becomes a piece"
    (whole, rest), sizes = map(weakref.ref, made._pieces), [piece.nbytes for piece in made._pieces]
    assert sizes == [14 << 20, record_bytes + 512], "whole segments, where a piece has its own"
    made.give()
    assert emptied == [None, 0], "once nothing refers to them"
    assert whole() is rest() is None
    assert made.take() == 5
    assert emptied == [None, 0, 0]
