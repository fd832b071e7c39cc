"""What the coordinator knows about lanes for the sake of placement, and the placement made from it. Pure.

    counters ─▶ rates ──┐
    dispatch's own load ┴─▶ one look at the lanes ─┐
    prefix events ─────────────────────────────────┴─▶ a proposal per request ─▶ the first that begins, or: wait

Not here: requests and their order, sockets. Invariants: load is what dispatch says, counted from the moment it sent a
request; only a lane that is passed as usable is ever chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from coordinator import limits
from coordinator.policy.affinity import Seat, SessionAffinity
from coordinator.policy.placement import Choice, LaneSight, Wanted, choose
from coordinator.policy.prefixes import Prefix, PrefixIndex
from coordinator.policy.rates import Counted, LaneRates, OutputLengths

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as placement sees it. `flow` names the tenant, too: sessions of two tenants never meet."""

    flow: str | None
    prompt_tokens: int
    max_tokens: int
    chains: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """The lanes at one moment: what all waiting requests see."""

    seats: Mapping[str, Seat]
    lanes: tuple[LaneSight, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where to, how long it takes there by itself, and how many tokens have to be computed."""

    seat: Seat
    work_s: float
    tokens: float
    read_s: float  # of the work, until the first token


@dataclass(frozen=True, slots=True)
class Proposal:
    """Where a job would go, and whether it had better wait."""

    choice: Choice
    placed: Placed | None = None  # None: no lane may begin


@dataclass(slots=True)
class _Lane:
    seat: Seat
    computed_tokens: int = 0  # by its process
    last_turn: int = 0


class Placer:
    """Lanes by name."""

    def __init__(self) -> None:
        self.rates = LaneRates()
        self.prefixes = PrefixIndex()
        self.lengths = OutputLengths()
        self._affinity = SessionAffinity(limits.AFFINITY_SESSIONS)
        self._lanes: dict[str, _Lane] = {}
        self._turn = 0

    def counted(self, seat: Seat, counted: Counted) -> None:
        """Take over which process a lane is and what it has counted."""
        self._lane(seat).computed_tokens = counted.prompt_tokens + counted.generated_tokens
        self.rates.look(seat.lane, counted)

    def keep(self, lanes: set[str]) -> None:
        """Forget all other lanes."""
        for gone in self._lanes.keys() - lanes:
            del self._lanes[gone]
            self.rates.forget(gone)
            self.prefixes.forget(gone)

    def tell(self, seat: Seat, added: Sequence[Prefix], removed: Sequence[Prefix], *, anew: bool) -> None:
        """What a lane's process says about its prefixes; `anew`: all that it has."""
        self._lane(seat)
        if anew:
            self.prefixes.forget(seat.lane)
        self.prefixes.remove(seat.lane, removed)
        self.prefixes.add(seat.lane, added)

    def look(self, busy_s: Mapping[Seat, Sequence[float]], capacity: int) -> Look:
        """At the lanes that may get work: `busy_s` says of each how long its requests will still take."""
        return Look(
            {seat.lane: seat for seat in busy_s}, tuple(self._sight(*each, capacity) for each in busy_s.items())
        )

    def propose(self, job: Job, look: Look) -> Proposal:
        """The best lane for a job, and whether it had better wait for another."""
        wanted = self._wanted(job, look)
        choice = choose(look.lanes, wanted)
        if choice.lane is None:
            return Proposal(choice)
        return Proposal(choice, _placed(wanted, look.seats[choice.lane.name], choice.lane))

    def expected(self, job: Job, look: Look) -> dict[Seat, Placed]:
        """What the job would be on each of these lanes if it began there now."""
        wanted = self._wanted(job, look)
        return {look.seats[lane.name]: _placed(wanted, look.seats[lane.name], lane) for lane in look.lanes}

    def placed(self, job: Job, seat: Seat) -> None:
        """The job goes there: the lane's turn is over, and the session's home is there."""
        self._turn += 1
        self._lane(seat).last_turn = self._turn
        self._affinity.remember(job.flow, seat)

    def tokens_per_s(self, lanes: Sequence[str]) -> float:
        """What these lanes do together on work of the usual mixture, half prompt and half output in tokens."""
        speeds = [self.rates.speed(lane) for lane in lanes]
        return math.fsum(2.0 / (1.0 / speed.prefill + 1.0 / speed.decode) for speed in speeds)

    def _wanted(self, job: Job, look: Look) -> Wanted:
        remembered = self.prefixes.remembered(job.chains, look.seats)
        for lane, tokens in remembered.items():
            if tokens >= job.prompt_tokens:  # the last token is read again, for what comes after it
                remembered[lane] = job.prompt_tokens - 1.0
        home = self._affinity.seat(job.flow)
        at_home = home is not None and look.seats.get(home.lane) == home
        output_tokens = self.lengths.expected(job.max_tokens)
        return Wanted(job.prompt_tokens, output_tokens, remembered, home.lane if home is not None and at_home else None)

    def _sight(self, seat: Seat, left_s: Sequence[float], capacity: int) -> LaneSight:
        lane, speed, free = self._lane(seat), self.rates.speed(seat.lane), len(left_s) < capacity
        cold = 1.0 + limits.COLD_COST * max(0.0, 1.0 - lane.computed_tokens / limits.WARM_TOKENS)
        wait_s, load = 0.0 if free else min(left_s), len(left_s)
        return LaneSight(seat.lane, free, wait_s, cold / speed.prefill, cold / speed.decode, load, lane.last_turn)

    def _lane(self, seat: Seat) -> _Lane:
        lane = self._lanes.get(seat.lane)
        if lane is None:
            lane = self._lanes[seat.lane] = _Lane(seat)
        elif lane.seat is not seat and lane.seat != seat:  # another process: it remembers nothing of the one before
            self.prefixes.forget(seat.lane)
            lane.seat, lane.computed_tokens = seat, 0
        return lane


def _placed(wanted: Wanted, seat: Seat, lane: LaneSight) -> Placed:
    tokens = wanted.prompt_tokens - wanted.remembered.get(lane.name, 0.0) + wanted.output_tokens
    work_s = wanted.work_s(lane)
    return Placed(seat, work_s, tokens, work_s - wanted.output_tokens * lane.write_s)


def first_to_begin(
    order: Iterable[_T], propose: Callable[[_T], Proposal], waited_s: Callable[[_T], float]
) -> tuple[_T, Placed] | float:
    """Of requests in fair order, the first that begins now; or in how many seconds to look again.

    Those whom a free lane suits go before those who had better let others pass; `waited_s`: how long a request has
    waited although a lane was free.
    """
    waiting = list(order)
    again_s = float("inf")
    proposals: list[Proposal] = []
    for item in waiting:
        proposals.append(propose(item))
        left_s = proposals[-1].choice.wait_s(waited_s(item), others=len(waiting) > 1)
        if (placed := proposals[-1].placed) and not left_s:
            return item, placed
        again_s = min(again_s, left_s)
    for item, proposal in zip(waiting, proposals, strict=True):
        left_s = proposal.choice.wait_s(waited_s(item), others=False)
        if proposal.placed and not left_s:
            return item, proposal.placed
        again_s = min(again_s, left_s)
    return again_s
