"""Which lane gets a request: the one that has it done first, in seconds of expected work. One pure function.

    until it is free + (prompt - remembered) / prefill rate + output / decode rate,   more while its cache is cold

While others wait, reading again costs them, too: then a request first lets those pass whom a free lane suits better.

Not here: where the figures come from (placer). Invariants: never a lane that may not begin; the order of the argument
changes nothing; a request waits for a busy lane only while that is the quicker way, and no longer than going elsewhere
would have cost, and lets others pass for `limits.PASSING` times that at most: so it always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator import limits
from coordinator.policy.rates import Speed

_EQUAL = 1.02  # costs so close to the best are equal: measured rates are no better than that
_EQUAL_S = 0.005


@dataclass(frozen=True, slots=True)
class LaneSight:
    """A lane that may get work, as one request sees it."""

    name: str
    free: bool  # may begin now
    wait_s: float  # expected, until it may begin; 0 when free
    speed: Speed
    remembered_tokens: float  # of the prompt, that need not be read again
    warmth: float  # 0: its cache has just begun, 1: warm
    is_home: bool  # the session was served there last, by the process that runs now
    load: int  # requests that it has now
    last_turn: int  # number of the last dispatch that went to it; 0: none yet


@dataclass(frozen=True, slots=True)
class Go:
    """Begin there now."""

    lane: str


@dataclass(frozen=True, slots=True)
class Wait:
    """For a busy lane; look again after `seconds` at the latest. `seconds` is infinite when no lane may begin."""

    seconds: float


def work_s(lane: LaneSight, prompt_tokens: int, output_tokens: float) -> float:
    """Expected seconds on that lane once it begins."""
    read = max(0.0, prompt_tokens - lane.remembered_tokens)
    seconds = read / lane.speed.prefill + output_tokens / lane.speed.decode
    return seconds * (1.0 + limits.COLD_COST * (1.0 - lane.warmth))


def choose(
    lanes: Iterable[LaneSight], prompt_tokens: int, output_tokens: float, waited_s: float, *, others: bool = False
) -> Go | Wait:
    """`waited_s`: how long the request has waited although a lane was free. `others`: some wait, too."""
    sights = list(lanes)
    works = {lane.name: work_s(lane, prompt_tokens, output_tokens) for lane in sights}
    costs = {lane.name: lane.wait_s + works[lane.name] for lane in sights}
    free = [lane for lane in sights if lane.free]
    if not free:
        return Wait(float("inf"))
    least = min(costs[lane.name] for lane in free)
    busy = min((costs[lane.name] for lane in sights if not lane.free), default=float("inf"))
    patience_s = least - busy - waited_s
    if others:
        patience_s = max(patience_s, limits.PASSING * (least - min(works.values())) - waited_s)
    if patience_s > _EQUAL_S:
        return Wait(patience_s)
    equal = [lane for lane in free if costs[lane.name] <= least * _EQUAL + _EQUAL_S]
    best = min(equal, key=lambda lane: (not lane.is_home, lane.load, lane.last_turn, lane.name))
    return Go(best.name)
