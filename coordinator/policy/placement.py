"""Which lane gets a request: the one that has it done first, in seconds of expected work. One pure function.

    until it is free + (prompt - remembered) x seconds to read a token + output x seconds to write one

While others wait, reading again costs them, too: then a request first lets those pass whom a free lane suits better.

Not here: where the figures come from (placer). Invariants: never a lane that may not begin; the order of the argument
changes nothing; a request waits for a busy lane only while that is the quicker way, and no longer than going elsewhere
would have cost, and lets others pass for `limits.PASSING` times that at most: so it always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coordinator import limits

_EQUAL = 1.02  # costs so close to the best are equal: measured rates are no better than that
_EQUAL_S = 0.005


class LaneSight(NamedTuple):
    """A lane that may get work, as every request of one look sees it. A tuple: 64 of them are made for a decision."""

    name: str
    free: bool  # may begin now
    wait_s: float  # expected, until it may begin; 0 when free
    read_s: float  # a prompt token, its cache as cold as it is
    write_s: float  # an output token
    load: int  # requests that it has now
    last_turn: int  # number of the last dispatch that went to it; 0: none yet


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one request needs of a lane."""

    prompt_tokens: int
    output_tokens: float
    remembered: Mapping[str, float]  # of the prompt, tokens that need not be read again, by lane
    home: str | None = None  # where the session was served last, by the process that runs now

    def work_s(self, lane: LaneSight) -> float:
        """Expected seconds on that lane once it begins."""
        read = max(0.0, self.prompt_tokens - self.remembered.get(lane.name, 0.0))
        return read * lane.read_s + self.output_tokens * lane.write_s


@dataclass(frozen=True, slots=True)
class Choice:
    """The best of the lanes that may begin, and how long a request had better wait for a busy one."""

    lane: LaneSight | None  # None: no lane may begin
    alone_s: float  # below zero: it had better not
    passing_s: float  # while others wait, too: then those go first whom this lane suits

    def wait_s(self, waited_s: float, *, others: bool) -> float:
        """How much longer, of a request that has waited so long although a lane was free; 0: it begins now."""
        if self.lane is None:
            return float("inf")
        left_s = (max(self.alone_s, self.passing_s) if others else self.alone_s) - waited_s
        return left_s if left_s > _EQUAL_S else 0.0


NOWHERE = Choice(None, float("inf"), float("inf"))


def choose(lanes: Iterable[LaneSight], wanted: Wanted) -> Choice:
    """One request's choice among the lanes."""
    works = [(wanted.work_s(lane), lane) for lane in lanes]
    free = [each for each in works if each[1].free]
    if not free:
        return NOWHERE
    least, least_work = min(free)[0], min(works)[0]
    least_busy = min((lane.wait_s + work for work, lane in works if not lane.free), default=float("inf"))
    most, home = least * _EQUAL + _EQUAL_S, wanted.home
    equal = [lane for cost, lane in free if cost <= most]
    best = min(equal, key=lambda lane: (lane.name != home, lane.load, lane.last_turn, lane.name))
    return Choice(best, least - least_busy, limits.PASSING * (least - least_work))
