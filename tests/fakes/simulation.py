"""A simulated cluster without sockets: lanes with a cost model and faults, under the real dispatcher and policies.

    SimLane    tokens at `token_at`, times from rates, faults by a seeded chance: dies, breaks, errs, sticks, refuses
    SimRoster  the fleet's part: a dead lane returns after a while as another process, a suspected one is looked at

Runs on `virtual.VirtualLoop`. Invariant: as with a real lane, at most one generation runs and one visits it between two
chunks of its prompt; a place is free only when its stream has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from coordinator.errors import LaneBusy, LaneFailed, LaneLost
from coordinator.fleet.lane_client import LaneAccepted, LaneEvent, LaneFinished, LaneTokens
from coordinator.fleet.lane_view import LaneView, ModelView, PrefixNews, RegionView
from coordinator.fleet.subscribers import Subscribers
from laneproto.v1 import lane_pb2 as pb
from tests.fakes.lane import token_at

MODEL = ModelView("sim", "sim", b"\7" * 32, 256, 1 << 20, (2,), "f32", 1, 1 << 20, visitor_tokens=1 << 20)
FAULTS = ("die", "break", "err", "stick", "refuse")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a lane, in seconds."""

    prefill_s: float = 0.001  # a prompt token
    decode_s: float = 0.05  # an output token
    chunk_tokens: int = 4  # in one message
    chunk_rows: int = 16  # of a prompt, between two safe points
    return_s: float = 5.0  # until a dead lane serves again
    fault_chance: float = 0.0  # of a generation


@dataclass(eq=False, slots=True)
class _Run:
    request_id: str
    alone_s: float  # of computing, left to it as a visitor
    reading: bool = True
    computing: bool = False
    begun: bool = False
    waited_chunks: int = 0


class SimLane:
    """One lane and, in the dispatcher's eyes, its client."""

    def __init__(self, name: str, costs: Costs, chance: random.Random) -> None:
        self.name, self.costs, self._chance = name, costs, chance
        self.life = 0
        self.running: list[_Run] = []  # the active one, then its visitor
        self.visits = 0
        self.longest_wait_chunks = 0  # of another's prompt, that a visitor waited for
        self.counters = pb.Counters()
        self.replays = 0  # generations that went on from another lane's
        self.on_death: Callable[[SimLane], None] = lambda lane: None
        self._cancelled: set[str] = set()
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def incarnation(self) -> bytes:
        return f"{self.name}/{self.life}".encode()

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[LaneEvent, None]:
        life, gone, costs = self.life, self._gone, self.costs
        if gone.is_set():
            raise LaneLost(f"{self.name} is gone")
        fault = self._chance.choice(FAULTS) if self._chance.random() < costs.fault_chance else ""
        if fault == "refuse" or (self.running and not self._may_visit(request)):
            raise LaneBusy(f"{self.name} is busy")
        run = _Run(request.request_id, request.alone_ms / 1000)
        self.running.append(run)
        self.visits += len(self.running) > 1
        self.replays += request.replayed_tokens > 0
        try:
            yield LaneAccepted(0)
            replayed = request.replayed_tokens
            prompt = request.prompt_ids[: len(request.prompt_ids) - replayed]
            left = request.max_tokens - replayed
            strike_at = self._chance.randint(0, left) if fault else -1
            read_s = costs.prefill_s * len(request.prompt_ids)
            for first in range(0, len(request.prompt_ids), costs.chunk_rows):
                if request.request_id in self._cancelled:
                    break
                rows = min(costs.chunk_rows, len(request.prompt_ids) - first)
                await self._compute(run, costs.prefill_s * rows, gone)
            await self._turn(run)  # a visitor of the last chunk runs before the first token
            run.reading = False
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
                await self._compute(run, costs.decode_s * count, gone)
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
                self.running.remove(run)
            self._news()

    async def cancel(self, request_id: str) -> bool:
        await asyncio.sleep(0.0003)
        if request_id not in [run.request_id for run in self.running]:
            return False
        self._cancelled.add(request_id)
        self._news()
        return True

    async def hello(self) -> pb.HelloReply:
        await asyncio.sleep(0.0003)
        if self._gone.is_set():
            raise LaneLost(f"{self.name} is gone")
        status = pb.LaneStatus(request_ids=[run.request_id for run in self.running])
        return pb.HelloReply(incarnation=self.incarnation, status=status)

    def die(self) -> None:
        """The process is gone, and everything that waits for it hears so."""
        if not self._gone.is_set():
            self._gone.set()
            self._news()
            self.on_death(self)

    def revive(self) -> None:
        """Another process."""
        self.life += 1
        self.running, self._gone = [], asyncio.Event()
        self.counters = pb.Counters()

    def _may_visit(self, request: pb.GenerateRequest) -> bool:
        active = self.running[0]
        return len(self.running) == 1 and active.request_id == request.interrupts and active.reading

    def _news(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _turn(self, run: _Run) -> bool:
        """Until it may compute: a visitor when the chunk has ended, the other when the visitor's time alone is over.

        Whether it shares the lane then.
        """
        while not self._gone.is_set() and run.request_id not in self._cancelled:
            other = next((other for other in self.running if other is not run), None)
            if other is None:
                return False
            visits = run is self.running[1]
            if visits and not run.begun:
                if not other.computing:
                    run.begun = True
                    self.longest_wait_chunks = max(self.longest_wait_chunks, run.waited_chunks)
                    return False
            elif visits or other.alone_s <= 0.0:
                return run.alone_s <= 0.0
            await self._changed.wait()
        return False

    async def _compute(self, run: _Run, seconds: float, gone: asyncio.Event) -> None:
        shares = await self._turn(run)
        if gone.is_set():
            raise LaneLost(f"{self.name} went away")
        if run.request_id in self._cancelled:
            return
        run.computing = True
        await asyncio.sleep(2 * seconds if shares else seconds)
        run.computing = False
        run.alone_s -= seconds
        for other in self.running:
            other.waited_chunks += other is not run and not other.begun
        self._news()
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
        self._views = self._see()
        self._subscribers = Subscribers()
        self.suspects = 0
        self.tell: Callable[[PrefixNews], None] = lambda news: None
        for lane in lanes:
            lane.on_death = self._on_death

    def lanes(self) -> list[LaneView]:
        return self._views

    def _see(self) -> list[LaneView]:
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
        return self._subscribers.add(callback)

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        self.tell = callback

    def regions(self) -> list[RegionView]:
        return []

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
        self._views = self._see()
        self._subscribers.tell()


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
    long_prompts: float = 0.0  # of the requests, as many have prompts a hundred times as long
    max_tokens: int = 24
    cancel_chance: float = 0.05
    timeout_chance: float = 0.02

    def changed(self, **changes: object) -> Scenario:
        """The same with other numbers."""
        return replace(self, **changes)  # type: ignore[arg-type]
