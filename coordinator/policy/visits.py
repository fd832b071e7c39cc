"""Which request may interrupt which lane's reading of a prompt, and for how long. Pure.

    waits behind a prompt that is read for long ─▶ its own work is small beside that ─▶ it visits, between two chunks

Not here: whose turn it is in the queue (fair_queue), the safe point (lanes). Invariants: a visitor's class is no worse
than the reading's; all visits together have a lane alone for at most `limits.VISITS` times what the reading takes, and
a visit that turns out longer shares the lane by halves: so a long prompt is read in at most 2 + `limits.VISITS` times
its own time, however many short requests come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator import limits
from coordinator.tenants import Priority


@dataclass(frozen=True, slots=True)
class Reading:
    """A request whose prompt a lane reads, and nobody visits."""

    priority: Priority
    read_s: float  # expected, of what is to be read of its prompt
    left_s: float  # expected, until the lane is free
    visits_s: float  # that earlier visits had the lane alone


@dataclass(frozen=True, slots=True)
class Visit:
    """Whom to interrupt, and how long the visitor has the lane alone."""

    host: str
    alone_s: float


def choose(readings: Mapping[str, Reading], works_s: Mapping[str, float], priority: Priority) -> Visit | None:
    """Of the readings by request id the one where the visitor is done first; works_s: its own work there."""
    best: tuple[float, str, float] | None = None
    for host, reading in readings.items():
        work_s = works_s[host]
        room_s = limits.VISITS * reading.read_s - reading.visits_s
        if priority > reading.priority or work_s > limits.VISIT_WORK * reading.left_s or work_s > room_s:
            continue
        alone_s = min(limits.VISIT_ALONE * work_s, room_s)
        if best is None or (work_s, host) < best[:2]:
            best = (work_s, host, alone_s)
    return best and Visit(best[1], best[2])
