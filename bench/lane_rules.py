"""Who goes where, for the simulator: the coordinator's own policies, and the simpler rules they are compared with.

Not here: time and lanes' work (placement). A rule is told of arrivals and ends, and is asked what an idle lane does
next. Invariant: `next` never names a lane that is not idle.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from bench.agent_traces import Turn
from coordinator import limits
from coordinator.errors import QueueFull
from coordinator.policy.affinity import Seat
from coordinator.policy.fair_queue import FairQueue, Ticket
from coordinator.policy.placer import Job, Placer, first_to_begin
from coordinator.policy.prefixes import Prefix
from coordinator.policy.rates import Counted
from coordinator.policy.shares import Shares
from coordinator.tenants import Priority, Tenant


@dataclass(slots=True, eq=False)
class Asked:
    """A turn that has been asked for."""

    turn: Turn
    rest: Iterator[Turn]  # of its session
    prompt_tokens: int
    arrived: float
    known_tokens: int  # of the prompt, said in this session before
    began: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    read_tokens: int = 0


class Rule(Protocol):
    """What the simulator asks."""

    def arrive(self, asked: Asked, now: float) -> bool:
        """A request is there; False: refused."""

    def next(self, busy_s: Mapping[str, float], now: float) -> tuple[Asked, str] | float | None:
        """The next request and its lane; or when to ask again; or nothing. `busy_s`: seconds until a lane is idle."""

    def ended(self, asked: Asked, lane: str, counted: Counted, forgotten: list[str]) -> None:
        """It is done; the lane remembers its session now, and no longer those."""


class Ours:
    """Fair queue and placement in seconds, as dispatch uses them."""

    def __init__(self, lanes: list[str], *, parked: bool) -> None:
        self._parked = parked  # conversations lie in the host's pool, too
        self._shares, self._placer = Shares(), Placer()
        self._queue: FairQueue[Asked] = FairQueue(limits.QUEUE_REQUESTS, self._shares)
        self._tickets: dict[int, tuple[Ticket, float]] = {}
        self._could: dict[int, float] = {}
        self._numbers = itertools.count()
        self._told: dict[str, dict[str, Prefix]] = {lane: {} for lane in lanes}
        for lane in lanes:
            self._placer.counted(_seat(lane), Counted(3000, 2.0, 50, 2.0))

    def arrive(self, asked: Asked, now: float) -> bool:
        """Into the queue."""
        turn = asked.turn
        tokens = asked.prompt_tokens + self._placer.lengths.expected(4096)
        tenant = Tenant(turn.tenant)
        flow = turn.parent or turn.session
        ticket = Ticket(str(next(self._numbers)), tenant, flow, Priority.DEFAULT, tokens, 0, now)
        try:
            self._queue.check_room(tenant, 0)
        except QueueFull:
            return False
        self._tickets[id(asked)] = ticket, 0.0
        self._shares.enter(tenant.name, flow)
        self._queue.push(asked, ticket)
        return True

    def next(self, busy_s: Mapping[str, float], now: float) -> tuple[Asked, str] | float | None:
        """In fair order, the first one that has a lane."""
        if all(busy_s.values()):
            return None
        seats = {_seat(lane): [seconds] if seconds else [] for lane, seconds in busy_s.items()}
        look = self._placer.look(seats, 1)
        first = first_to_begin(
            (asked for asked, _ in itertools.islice(self._queue.order(now), limits.LOOKAHEAD)),
            lambda asked: self._placer.propose(_job(asked), look),
            lambda asked: now - self._could.setdefault(id(asked), now),
        )
        if isinstance(first, float):
            return None if first == float("inf") else first
        asked, placed = first
        ticket, _ = self._tickets[id(asked)]
        self._queue.take(ticket, now)
        self._placer.placed(_job(asked), placed.seat)
        self._tickets[id(asked)] = ticket, placed.tokens
        self._shares.charge(ticket.tenant.name, ticket.flow, placed.tokens, 1.0)
        self._could.pop(id(asked))
        return asked, placed.seat.lane

    def ended(self, asked: Asked, lane: str, counted: Counted, forgotten: list[str]) -> None:
        """Settled, and learnt from."""
        ticket, charged = self._tickets.pop(id(asked))
        had = asked.read_tokens + asked.turn.output_tokens
        self._shares.charge(ticket.tenant.name, ticket.flow, had - charged, 1.0)
        self._shares.leave(ticket.tenant.name, ticket.flow)
        self._placer.lengths.ended(asked.turn.output_tokens)
        self._placer.counted(_seat(lane), counted)
        told = self._told[lane]
        gone = [told.pop(session) for session in (*forgotten, asked.turn.session) if session in told]
        added = Prefix(asked.turn.session.encode(), asked.prompt_tokens + asked.turn.output_tokens)
        if self._parked:
            self._placer.tell(_seat("pool"), [Prefix(added.chain, added.tokens, parked=True)], [], anew=False)
        told[asked.turn.session] = added
        self._placer.tell(_seat(lane), [added], gone, anew=False)


class FirstFree:
    """First come, first served, by the first idle lane; also the ideal, which differs only in what lanes remember."""

    def __init__(self, lanes: list[str]) -> None:
        self._waiting: deque[Asked] = deque()

    def arrive(self, asked: Asked, now: float) -> bool:
        """At the tail."""
        if len(self._waiting) >= limits.QUEUE_REQUESTS:
            return False
        self._waiting.append(asked)
        return True

    def next(self, busy_s: Mapping[str, float], now: float) -> tuple[Asked, str] | float | None:
        """The head."""
        idle = [lane for lane, seconds in busy_s.items() if not seconds]
        return (self._waiting.popleft(), idle[0]) if idle and self._waiting else None

    def ended(self, asked: Asked, lane: str, counted: Counted, forgotten: list[str]) -> None:
        """Nothing is learnt."""


class AtArrival:
    """A lane is chosen when the request arrives, and each lane has a line of its own."""

    def __init__(self, lanes: list[str], how: str) -> None:
        self._lines: dict[str, deque[Asked]] = {lane: deque() for lane in lanes}
        self._open = dict.fromkeys(lanes, 0)
        self._turns = itertools.cycle(lanes)
        self._homes: dict[str, str] = {}
        self._how = how

    def arrive(self, asked: Asked, now: float) -> bool:
        """Into a line."""
        if sum(map(len, self._lines.values())) >= limits.QUEUE_REQUESTS:
            return False
        if self._how == "strict":
            lane = self._homes.setdefault(asked.turn.session, next(self._turns))
        elif self._how == "least-loaded":
            lane = min(self._open, key=lambda name: (self._open[name], name))
        else:
            lane = next(self._turns)
        self._open[lane] += 1
        self._lines[lane].append(asked)
        return True

    def next(self, busy_s: Mapping[str, float], now: float) -> tuple[Asked, str] | float | None:
        """The head of an idle lane's line."""
        for lane, seconds in busy_s.items():
            if not seconds and self._lines[lane]:
                return self._lines[lane].popleft(), lane
        return None

    def ended(self, asked: Asked, lane: str, counted: Counted, forgotten: list[str]) -> None:
        """One less there."""
        self._open[lane] -= 1


def make(rule: str, lanes: list[str]) -> Rule:
    """By name."""
    if rule.startswith("ours"):
        return Ours(lanes, parked=rule == "ours-parked")
    return FirstFree(lanes) if rule in ("first-free", "ideal") else AtArrival(lanes, rule)


def _job(asked: Asked) -> Job:
    return Job(asked.turn.session, asked.prompt_tokens, 4096, [asked.turn.session.encode()])


def _seat(lane: str) -> Seat:
    return Seat(lane, b"1")
