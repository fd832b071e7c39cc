"""The pool's memory is registered as it is first used, piece by piece, and anew when the owner gave memory back."""

import pytest

from lanes.device.pool_pins import PoolPins
from lanes.device.registered import Registered
from shared_experts import host_memory
from shared_experts.park_memory import ParkMemory
from tests.unit.test_device_start import Driver

PIECE = 1 << 16


@pytest.fixture
def memory():
    made = ParkMemory.create(5 * PIECE // 2, 4096)
    yield made
    made.close()


def test_pieces_are_registered_once_when_they_are_used(memory):
    driver = Driver()
    pins = PoolPins(Registered(load=lambda name: driver), PIECE)
    assert pins.cover(memory, PIECE - 1, 2)
    assert not pins.cover(memory, 0, 2 * PIECE)
    assert pins.cover(memory, 2 * PIECE, 1)
    at = memory.address
    assert driver.registered == [(at, PIECE, 1), (at + PIECE, PIECE, 1), (at + 2 * PIECE, PIECE // 2, 1)]
    assert not pins.stale(memory)
    memory.punches += 1
    assert pins.stale(memory)
    pins.drop()
    assert driver.registered == []
    assert pins.cover(memory, 0, 1)
    assert not pins.stale(memory)


def test_what_the_driver_refuses_is_asked_once(memory):
    driver = Driver(codes={"cuMemHostRegister_v2": 1})
    pins = PoolPins(Registered(load=lambda name: driver), PIECE)
    assert pins.cover(memory, 0, 1)
    assert not pins.cover(memory, 0, 1)
    assert pins.refused
    assert len(driver.registered) == 1


def test_runs_are_neighbours_within_borders(memory):
    assert memory.runs((3, 4, 5, 9, 8), 4 * 4096 + 1) == [(3 * 4096, 3 * 4096), (9 * 4096, 4096), (8 * 4096, 1)]
    assert memory.runs((15, 16, 17), 3 * 4096, PIECE) == [(15 * 4096, 4096), (16 * 4096, 2 * 4096)]
    assert memory.runs((1, 2), 5) == [(4096, 5)]
    memory.view(4096, 5)[:] = 7
    assert memory.segment(1)[:6].tolist() == [7] * 5 + [0]


def test_a_little_more_than_is_used_is_taken_ahead_where_the_host_has_room(memory, monkeypatch):
    room = {"bytes": 1 << 40}
    monkeypatch.setattr(host_memory, "available_bytes", lambda: room["bytes"])
    pins = PoolPins(Registered(load=lambda name: Driver()), PIECE, PIECE)
    assert pins.next(memory) == (0, PIECE)
    room["bytes"] = host_memory.floor_bytes() + 2 * PIECE
    assert pins.next(memory) is None, "a host that is short of memory"
    room["bytes"] += 1
    assert pins.next(memory) == (0, PIECE)
    assert pins.cover(memory, 0, PIECE)
    assert pins.next(memory) is None, "as far ahead as it was asked"
    memory.touched_bytes = 1
    assert pins.next(memory) == (PIECE, PIECE)
    assert pins.cover(memory, PIECE, PIECE)
    memory.touched_bytes = 2 * PIECE + 1
    room["bytes"] = 0
    assert pins.next(memory) == (2 * PIECE, PIECE // 2), "what is used is registered whatever the host has"
    memory.view(5, 3)[:] = 7
    memory.populate(0, PIECE)
    assert memory.view(4, 5).tolist() == [0, 7, 7, 7, 0]
    assert pins.cover(memory, 2 * PIECE, 1)
    assert pins.next(memory) is None
    assert pins.registered_bytes == 5 * PIECE // 2
