"""Conversations of lanes whose running one lies in a seat: kept, parked and taken back like any others, bit for bit."""

import time

import numpy as np
import pytest
import torch

from lanes import limits
from lanes.counters import Counters
from lanes.device.arena import Arena
from lanes.device.carrier import DeviceCarrier
from lanes.device.host import PinnedHost
from lanes.device.pool_pins import PoolPins
from lanes.device.registered import Registered
from lanes.device.side import Side
from lanes.device.staging import Staging, size_for
from lanes.state.carrier import Carrier
from lanes.state.conversations import Conversations
from lanes.state.host import PLAIN, Host
from lanes.state.parking import Parking
from lanes.state.pool import StatePool
from lanes.state.seat import Seat
from lanes.state.snapshot import Identity
from shared_experts.park_server import ParkServer
from tests.fakes.late_host import LateHost
from tests.fakes.states import SHAPE, fresh, read, same
from tests.unit.test_conversations import feed
from tests.unit.test_device_start import Driver

CONTEXT = 200
IDENTITY = Identity.of(b"f" * 32, SHAPE)


class Lane:
    """As a lane on a GPU has them: whoever runs takes the seat and keeps it."""

    def __init__(self, path, kept_tokens: int, host: Host = PLAIN, arena: Arena | None = None) -> None:
        self.counters = Counters()
        carrier = Carrier()
        if arena is not None:
            side = Side(torch.device("cpu"))
            staging = Staging(side, size_for(SHAPE))
            host = PinnedHost(arena, side, staging)
        self.seat = Seat(SHAPE, CONTEXT, "cpu", host)
        if arena is not None:
            pins = PoolPins(Registered(load=lambda name: Driver()), piece_bytes=4096)
            carrier = DeviceCarrier(side, staging, pins, seat=self.seat.take, stays=arena.__contains__)
        self.carrier = carrier
        self.park = Parking(path, IDENTITY, self.counters, clock=time.monotonic, carrier=carrier)
        pool = StatePool(SHAPE, SHAPE.bytes(CONTEXT) + kept_tokens * 200, host=None if host is PLAIN else host)
        self.held = Conversations(pool, self.counters, self.park)

    def turn(self, prompt: list[int], answer: list[int], marks: tuple[int, ...] = ()) -> int:
        """A whole generation; the tokens that were known."""
        held = self.held
        begun = held.begin(prompt, len(prompt) + len(answer), b"")
        state = held.pool[begun.slot]
        assert same(state, fresh(prompt[: begun.cached_tokens]))
        self.seat.take(state)
        assert same(state, fresh(prompt[: begun.cached_tokens]))
        at = begun.cached_tokens
        for mark in sorted({*(m for m in marks if m > at), len(prompt)}):
            feed(held, begun.slot, prompt[at:mark])
            held.checkpoint(begun.slot)
            at = mark
        feed(held, begun.slot, answer)
        assert state.seated
        held.end(begun.slot)
        return begun.cached_tokens

    def settle(self) -> None:
        """Parks what waits, the seat's occupant too."""
        for _ in range(10_000):
            if not self.held.idle():
                return
        raise AssertionError("never idle")


@pytest.fixture(params=["plain", "late", "device"])
def lanes(tmp_path, monkeypatch, request):
    """Host memory as on a CPU; whose copies come as late as they may; as on a GPU, played on the CPU."""
    monkeypatch.setattr(limits, "PAGE_TOKENS", 16)
    with ParkServer(tmp_path / "park.sock", 4 << 20, segment_bytes=512) as server:
        arenas = [Arena(1 << 18, None) for _ in range(2)]
        made = {
            "plain": lambda arena: Lane(server.path, 300),
            "late": lambda arena: Lane(server.path, 300, LateHost()),
            "device": lambda arena: Lane(server.path, 300, arena=arena),
        }[request.param]
        made = [made(arena) for arena in arenas]
        yield made
        for lane, arena in zip(made, arenas, strict=True):
            lane.park.close()
            if isinstance(lane.carrier, DeviceCarrier):
                lane.carrier.close()
            arena.close()


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
