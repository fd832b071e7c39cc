"""Conversations as a lane on a GPU has them, played on the CPU: a seat, pinned memory, a carrier, a park pool."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from lanes.counters import Counters
from lanes.device.arena import Arena
from lanes.device.carrier import DeviceCarrier
from lanes.device.host import PinnedHost
from lanes.device.pool_pins import PoolPins
from lanes.device.registered import Registered
from lanes.device.side import Side
from lanes.device.staging import Staging, size_for
from lanes.state.conversations import Conversations
from lanes.state.host import PLAIN, Host
from lanes.state.parking import Parking
from lanes.state.pool import StatePool
from lanes.state.seat import Seat
from lanes.state.shape import StateShape
from lanes.state.snapshot import Identity
from tests.fakes.states import SHAPE, fresh, same
from tests.unit.test_conversations import feed
from tests.unit.test_device_start import Driver

CONTEXT = 200


class SeatedLane:
    """Whoever runs takes the seat and keeps it."""

    def __init__(
        self, path: Path | str, kept_tokens: int = 300, *, shape: StateShape = SHAPE, host: Host = PLAIN,
        carried: bool = False, arena_bytes: int = 1 << 18,
    ) -> None:  # fmt: skip
        """`carried`: by a `DeviceCarrier`, with pinned memory; else by the calling thread."""
        self.shape, self.counters, self.driver = shape, Counters(), Driver()
        self.carrier: DeviceCarrier | None = None
        self.arena: Arena | None = None
        if carried:
            side = Side(torch.device("cpu"))
            staging = Staging(side, size_for(shape))
            self.arena = Arena(arena_bytes, None)
            host = PinnedHost(self.arena, side, staging)
        self.seat = Seat(shape, CONTEXT, "cpu", host)
        if self.arena is not None:
            pins = PoolPins(Registered(load=lambda name: self.driver), piece_bytes=4096, ahead_bytes=64 << 10)
            stays = self.arena.__contains__
            self.carrier = DeviceCarrier(side, staging, pins, seat=self.seat.take, stays=stays, cores=())
        identity = Identity.of(b"f" * 32, shape)
        self.park = Parking(Path(path), identity, self.counters, clock=time.monotonic, carrier=self.carrier)
        pool = StatePool(
            shape, shape.bytes(CONTEXT) + kept_tokens * shape.bytes(100) // 100,
            host=None if host is PLAIN else host, branch=None if host is PLAIN else self.seat.branch,
        )  # fmt: skip
        self.held = Conversations(pool, self.counters, self.park)

    def turn(
        self, prompt: list[int], answer: list[int], marks: tuple[int, ...] = (), *, tenant: bytes = b"",
        beside: bool = True,
    ) -> int:  # fmt: skip
        """A whole generation, its state compared at the beginning; the tokens that were known. `beside`: what waits is
        parked meanwhile."""
        held = self.held
        begun = held.begin(prompt, len(prompt) + len(answer), tenant)
        state = held.pool[begun.slot]
        truth = fresh(prompt[: begun.cached_tokens], self.shape)
        assert same(state, truth)
        self.seat.take(state)
        assert same(state, truth)
        at = begun.cached_tokens
        for mark in sorted({*(m for m in marks if m > at), len(prompt)}):
            feed(held, begun.slot, prompt[at:mark])
            if beside:
                held.background(1 << 12)
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

    def close(self) -> None:
        """Ends threads and the connection."""
        self.park.close()
        if self.carrier is not None:
            self.carrier.close()
        if self.arena is not None:
            self.arena.close()
