"""A simulated cluster without sockets: lanes with a cost model and faults, under the real dispatcher and policies.

    SimLane    tokens at `token_at`, times from rates, faults by a seeded chance: dies, breaks, errs, sticks, refuses
    SimRoster  the fleet's part: a dead lane returns after a while as another process, a suspected one is looked at

Runs on `virtual.VirtualLoop`. Invariant: as with a real lane, at most one generation runs, and its place is free only
when its stream has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from coordinator.errors import LaneBusy, LaneFailed, LaneLost
from coordinator.fleet.lane_client import LaneAccepted, LaneEvent, LaneFinished, LaneTokens
from coordinator.fleet.lane_view import LaneView, ModelView, PrefixNews
from laneproto.v1 import lane_pb2 as pb
from tests.fakes.lane import token_at

MODEL = ModelView("sim", "sim", b"\7" * 32, 256, 1 << 20, (2,), "f32", 1, 1 << 20)
FAULTS = ("die", "break", "err", "stick", "refuse")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a lane, in seconds."""

    prefill_s: float = 0.001  # a prompt token
    decode_s: float = 0.05  # an output token
    chunk_tokens: int = 4  # in one message
    return_s: float = 5.0  # until a dead lane serves again
    fault_chance: float = 0.0  # of a generation


class SimLane:
    """One lane and, in the dispatcher's eyes, its client."""

    def __init__(self, name: str, costs: Costs, chance: random.Random) -> None:
        self.name, self.costs, self._chance = name, costs, chance
        self.life = 0
        self.running: str | None = None
        self.counters = pb.Counters()
        self.replays = 0  # generations that went on from another lane's
        self.on_death: Callable[[SimLane], None] = lambda lane: None
        self._cancelled: set[str] = set()
        self._gone = asyncio.Event()

    @property
    def incarnation(self) -> bytes:
        return f"{self.name}/{self.life}".encode()

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[LaneEvent, None]:
        life, gone, costs = self.life, self._gone, self.costs
        if gone.is_set():
            raise LaneLost(f"{self.name} is gone")
        fault = self._chance.choice(FAULTS) if self._chance.random() < costs.fault_chance else ""
        if fault == "refuse" or self.running is not None:
            raise LaneBusy(f"{self.name} is busy")
        self.running = request.request_id
        self.replays += request.replayed_tokens > 0
        try:
            yield LaneAccepted(0)
            replayed = request.replayed_tokens
            prompt = request.prompt_ids[: len(request.prompt_ids) - replayed]
            left = request.max_tokens - replayed
            strike_at = self._chance.randint(0, left) if fault else -1
            read_s = costs.prefill_s * len(request.prompt_ids)
            await self._pass(read_s, gone, request.request_id)
            self.counters.prompt_tokens += len(request.prompt_ids)
            self.counters.prefill_ns += int(read_s * 1e9)
            sent, reason = 0, pb.FINISH_REASON_LENGTH
            while True:
                if fault and sent >= strike_at:
                    await self._strike(fault, gone)
                    reason = pb.FINISH_REASON_ERROR
                    break
                if request.request_id in self._cancelled:
                    reason = pb.FINISH_REASON_CANCELLED
                    break
                if sent == left:
                    break
                count = min(costs.chunk_tokens, left - sent, strike_at - sent if fault else left)
                await self._pass(costs.decode_s * count, gone, request.request_id)
                yield LaneTokens([pb.Token(id=token_at(prompt, replayed + sent + k)) for k in range(count)])
                sent += count
                self.counters.generated_tokens += count
                self.counters.decode_ns += int(costs.decode_s * count * 1e9)
            usage = pb.Usage(prompt_tokens=len(prompt), completion_tokens=replayed + sent)
            code = "non_finite_logits" if reason == pb.FINISH_REASON_ERROR else ""
            yield LaneFinished(reason, usage, pb.Counters(), code, "")
            if code:
                self.die()
        finally:
            self._cancelled.discard(request.request_id)
            if self.life == life:
                self.running = None

    async def cancel(self, request_id: str) -> bool:
        await asyncio.sleep(0.0003)
        if self.running != request_id:
            return False
        self._cancelled.add(request_id)
        return True

    async def hello(self) -> pb.HelloReply:
        await asyncio.sleep(0.0003)
        if self._gone.is_set():
            raise LaneLost(f"{self.name} is gone")
        status = pb.LaneStatus(active_request_id=self.running or "")
        return pb.HelloReply(incarnation=self.incarnation, status=status)

    def die(self) -> None:
        """The process is gone, and everything that waits for it hears so."""
        if not self._gone.is_set():
            self._gone.set()
            self.on_death(self)

    def revive(self) -> None:
        """Another process."""
        self.life += 1
        self.running, self._gone = None, asyncio.Event()
        self.counters = pb.Counters()

    async def _pass(self, seconds: float, gone: asyncio.Event, request_id: str) -> None:
        await asyncio.sleep(seconds)
        if gone.is_set():
            raise LaneLost(f"{self.name} went away")

    async def _strike(self, fault: str, gone: asyncio.Event) -> None:
        match fault:
            case "die":
                self.die()
                raise LaneLost(f"{self.name} went away")
            case "break":
                raise LaneFailed(f"{self.name} broke its stream")
            case "stick":  # no event any more, until the fleet's time limit
                await asyncio.sleep(15.0)
                self.die()
                raise LaneLost(f"{self.name} was killed")


class SimRoster:
    """Implements `lane_view.Roster`."""

    def __init__(self, lanes: list[SimLane]) -> None:
        self._lanes = {lane.name: lane for lane in lanes}
        self._states = dict.fromkeys(self._lanes, "ready")
        self._callbacks: dict[object, Callable[[], None]] = {}
        self.suspects = 0
        self.tell: Callable[[PrefixNews], None] = lambda news: None
        for lane in lanes:
            lane.on_death = self._on_death

    def lanes(self) -> list[LaneView]:
        return [
            LaneView(
                lane.name, "", self._states[lane.name],  # type: ignore[arg-type]
                lane.incarnation if self._states[lane.name] == "ready" else b"", MODEL, counters=lane.counters,
            )
            for lane in self._lanes.values()
        ]  # fmt: skip

    def client(self, name: str) -> SimLane:
        return self._lanes[name]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        key = object()
        self._callbacks[key] = callback

        def unsubscribe() -> None:
            self._callbacks.pop(key, None)

        return unsubscribe

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        self.tell = callback

    def owner_restarts(self) -> int:
        return 0

    def report_suspect(self, name: str) -> None:
        self.suspects += 1

    def _on_death(self, lane: SimLane) -> None:
        loop = asyncio.get_running_loop()
        # the fleet hears of it a little after the stream's reader, or a little before
        loop.call_soon(self._set, lane.name, "dead")
        loop.call_later(lane.costs.return_s, self._returned, lane)

    def _returned(self, lane: SimLane) -> None:
        lane.revive()
        self._set(lane.name, "ready")

    def _set(self, name: str, state: str) -> None:
        self._states[name] = state
        for callback in tuple(self._callbacks.values()):
            callback()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Events as data: how many requests come how, and what may go wrong."""

    requests: int
    lanes: int = 4
    seed: int = 0
    rate_per_s: float = 3.0
    costs: Costs = Costs()
    tenants: int = 3
    sessions: int = 5
    prompt_tokens: int = 40
    max_tokens: int = 24
    cancel_chance: float = 0.05
    timeout_chance: float = 0.02

    def changed(self, **changes: object) -> Scenario:
        """The same with other numbers."""
        return replace(self, **changes)  # type: ignore[arg-type]
