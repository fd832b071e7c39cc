"""Requests that interrupt the reading of another's prompt: who reads, who visits, what it has cost.

Not here: the rule (policy.visits), moving requests (dispatch). Invariant: a reading has at most one visitor at a time,
and is charged what its visitors have had of the lane, not what they might have had.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator import limits
from coordinator.fleet.lane_view import LaneView
from coordinator.lane_run import LaneRun
from coordinator.policy.affinity import Seat
from coordinator.policy.placer import Job, Look, Placed, Placer
from coordinator.policy.visits import Reading, choose
from coordinator.tenants import Priority


@dataclass(frozen=True, slots=True)
class Found:
    """Where a waiting request may begin now."""

    host: LaneRun
    placed: Placed
    alone_s: float


class Visits:
    """Looks at the running requests; `runs` are dispatch's."""

    def __init__(self, runs: Mapping[str, LaneRun], placer: Placer) -> None:
        self._runs, self._placer = runs, placer

    def visits(self, run: LaneRun) -> bool:
        """Whether it shares a lane with the one that it interrupted: then it takes no place of its own."""
        return run.host is not None and self._runs.get(run.host.generation.request.id) is run.host

    def hosts(self, ready: Collection[Seat], views: Collection[LaneView], now: float) -> list[LaneRun]:
        """Those that may be interrupted, of lanes that can do it: the ones that will take longest."""
        able = {view.name for view in views if view.model is not None and view.model.visitor_tokens}
        visited = {run.seat for run in self._runs.values() if run.host is not None}
        seats = {seat for seat in ready if seat.lane in able and seat not in visited}
        reading = [run for run in self._runs.values() if run.reads and run.seat in seats]
        return heapq.nlargest(limits.VISIT_HOSTS, reading, key=lambda run: run.left_s(now))

    def look(self, hosts: Sequence[LaneRun]) -> Look:
        """At their lanes: what all that wait see."""
        return self._placer.look({run.seat: () for run in hosts}, 1)

    def find(
        self,
        hosts: Sequence[LaneRun],
        look: Look,
        job: Job,
        priority: Priority,
        views: Collection[LaneView],
        now: float,
    ) -> Found | None:
        """Whom a waiting request may interrupt."""
        most = {view.name: view.model.visitor_tokens for view in views if view.model is not None}
        fits = {
            run.generation.request.id: run
            for run in hosts
            if job.prompt_tokens + job.max_tokens <= most.get(run.seat.lane, 0)
        }
        if not fits:
            return None
        expected = self._placer.expected(job, look)
        readings = {
            name: Reading(run.generation.request.priority, run.read_s, run.left_s(now), run.visits_s)
            for name, run in fits.items()
        }
        visit = choose(readings, {name: expected[run.seat].work_s for name, run in fits.items()}, priority)
        if visit is None:
            return None
        return Found(fits[visit.host], expected[fits[visit.host].seat], visit.alone_s)

    def began(self, run: LaneRun, found: Found) -> None:
        """The request was sent to visit."""
        run.host, run.alone_s = found.host, found.alone_s
        found.host.visits_s += found.alone_s

    def ended(self, run: LaneRun, now: float) -> None:
        """It runs no more: what it did not use of its time is given back."""
        if run.host is not None:
            run.host.visits_s -= max(0.0, run.alone_s - (now - run.began))

    def refused(self, run: LaneRun) -> bool:
        """The lane takes no visitor now; whether that was it, and not the lane itself being busy."""
        if run.host is None:
            return False
        run.host.reads = False  # its prompt was read meanwhile
        return True
