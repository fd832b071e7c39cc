"""What the coordinator knows about lanes for the sake of placement, and the placement made from it. Pure.

    counters ─▶ rates ─┐
    prefix events ─────┼─▶ one sight per lane ─▶ placement.choose ─▶ a seat, or: wait
    dispatch's own load┘

Not here: requests and their order, sockets. Invariants: load is what dispatch says, counted from the moment it sent a
request; only a lane that is passed as usable is ever chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.policy.affinity import Seat, SessionAffinity
from coordinator.policy.placement import LaneSight, Wait, choose, work_s
from coordinator.policy.prefixes import Prefix, PrefixIndex
from coordinator.policy.rates import Counted, LaneRates, OutputLengths


@dataclass(frozen=True, slots=True)
class Job:
    """A request, as placement sees it. `flow` names the tenant, too: sessions of two tenants never meet."""

    flow: str | None
    prompt_tokens: int
    max_tokens: int
    chains: Sequence[bytes] = ()
    waited_s: float = 0.0  # although a lane was free
    others: bool = False  # wait, too, and may suit a free lane better


@dataclass(frozen=True, slots=True)
class Placed:
    """Where to, how long it takes there by itself, and how many tokens have to be computed."""

    seat: Seat
    work_s: float
    tokens: float
    read_s: float  # of the work, until the first token


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

    def look(self, seat: Seat, counted: Counted) -> None:
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

    def place(self, job: Job, busy_s: Mapping[Seat, Sequence[float]], capacity: int) -> Placed | Wait:
        """A seat among those that may get work: `busy_s` says of each how long its requests will still take."""
        sights = self._sights(job, busy_s, capacity)
        output_tokens = self.lengths.expected(job.max_tokens)
        chosen = choose(sights.values(), job.prompt_tokens, output_tokens, job.waited_s, others=job.others)
        if isinstance(chosen, Wait):
            return chosen
        return self._placed(job, next(seat for seat in sights if seat.lane == chosen.lane), sights)

    def expected(self, job: Job, seats: Sequence[Seat]) -> dict[Seat, Placed]:
        """What the job would be on each of these seats if it began there now."""
        sights = self._sights(job, dict.fromkeys(seats, ()), 1)
        return {seat: self._placed(job, seat, sights) for seat in seats}

    def _sights(self, job: Job, busy_s: Mapping[Seat, Sequence[float]], capacity: int) -> dict[Seat, LaneSight]:
        home = self._affinity.seat(job.flow)
        remembered = self.prefixes.remembered(job.chains, [seat.lane for seat in busy_s])
        return {
            seat: LaneSight(
                name=seat.lane,
                free=len(left_s) < capacity,
                wait_s=0.0 if len(left_s) < capacity else min(left_s),
                speed=self.rates.speed(seat.lane),
                remembered_tokens=min(remembered[seat.lane], job.prompt_tokens - 1),
                warmth=min(1.0, self._lane(seat).computed_tokens / limits.WARM_TOKENS),
                is_home=seat == home,
                load=len(left_s),
                last_turn=self._lane(seat).last_turn,
            )
            for seat, left_s in busy_s.items()
        }

    def _placed(self, job: Job, seat: Seat, sights: Mapping[Seat, LaneSight]) -> Placed:
        sight, output_tokens = sights[seat], self.lengths.expected(job.max_tokens)
        tokens = job.prompt_tokens - sight.remembered_tokens + output_tokens
        work, read = (work_s(sight, job.prompt_tokens, output) for output in (output_tokens, 0.0))
        return Placed(seat, work, tokens, read)

    def placed(self, job: Job, seat: Seat) -> None:
        """The job goes there: the lane's turn is over, and the session's home is there."""
        self._turn += 1
        self._lane(seat).last_turn = self._turn
        self._affinity.remember(job.flow, seat)

    def tokens_per_s(self, lanes: Sequence[str]) -> float:
        """What these lanes do together on work of the usual mixture, half prompt and half output in tokens."""
        speeds = [self.rates.speed(lane) for lane in lanes]
        return math.fsum(2.0 / (1.0 / speed.prefill + 1.0 / speed.decode) for speed in speeds)

    def _lane(self, seat: Seat) -> _Lane:
        lane = self._lanes.setdefault(seat.lane, _Lane(seat))
        if lane.seat != seat:  # another process: it remembers nothing of what the one before did
            self.prefixes.forget(seat.lane)
            lane.seat, lane.computed_tokens = seat, 0
        return lane
