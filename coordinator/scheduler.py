"""Which lane gets the next request. One pure function.

Not here: the queue's order, the lanes' states (only lanes that may get work are passed), what a load is made of.
Invariants: never a lane at its capacity; the session's own lane when it is free; else the least loaded, ties to the one
whose last turn is longest ago, so that idle lanes take turns; the order of the argument changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """A lane that may get work."""

    name: str
    load: int  # requests dispatched to it and not yet ended
    capacity: int
    last_turn: int  # number of the last dispatch that went to it; 0: none yet


def choose(lanes: Iterable[LaneLoad], affine: str | None) -> str | None:
    """The lane for a request whose session was last served by `affine`; None: it has to wait."""
    free = [lane for lane in lanes if lane.load < lane.capacity]
    if any(lane.name == affine for lane in free):
        return affine
    best = min(free, key=lambda lane: (lane.load, lane.last_turn, lane.name), default=None)
    return best.name if best else None
