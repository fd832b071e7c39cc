"""Keeps the page's memory and tells its watchers: a snapshot a second, and after every change of a lane.

    roster ──change──┐
    clock ──1 s──────┴──▶ _run ──▶ History, Changes ──▶ latest snapshot ──▶ watchers, each at its own pace

Not here: HTTP (doors.page), what a snapshot says (snapshot). Invariants: at most `limits.PAGE_SUBSCRIBERS` watch; a
watcher that reads slowly skips snapshots and keeps nothing waiting but itself; without watchers none is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import structlog

from coordinator import limits
from coordinator.errors import Refused
from coordinator.fleet.lane_view import Roster
from coordinator.host.owner_status import OwnerStatus
from coordinator.page.changes import Changes
from coordinator.page.gauges import Gauges
from coordinator.page.history import History, Sample
from coordinator.page.snapshot import ANSWERED, Moment, snapshot
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.journal import Journal

log = structlog.get_logger()

_DRAFTS, _PLACES = ("drafts", "drafts_right"), (1, 2, 3)  # as lanes count them: drafts_at_1, …


class Live:
    """One per page. Use as an async context manager; everything belongs to that event loop."""

    def __init__(
        self, gauges: Gauges, roster: Roster, journal: Journal, outcomes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._gauges, self._roster, self._journal, self._outcomes = gauges, roster, journal, outcomes
        self._history, self._changes = History(), Changes()
        self._started_s = time.monotonic()
        self._server = importlib.metadata.version("expressway")
        self._wake = asyncio.Event()
        self._owner: OwnerStatus | None = None
        self._watchers = 0
        self._latest, self._number = "", 0
        self._news = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe = roster.subscribe(self._on_change)

    async def __aenter__(self) -> Live:
        self._sample()
        self._on_change()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._unsubscribe()
        self.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def end(self) -> None:
        """Every watcher's stream ends."""
        self._closed = True
        self._tell()

    async def read(self) -> str:
        """A snapshot of now, as JSON."""
        self._owner = await self._gauges.owner()
        return self._snapshot()

    async def watch(self) -> AsyncGenerator[str, None]:
        """Snapshots, the newest each time it is asked for one; `Refused` when too many watch."""
        if self._watchers >= limits.PAGE_SUBSCRIBERS:
            raise Refused(f"{limits.PAGE_SUBSCRIBERS} watch already")
        self._watchers += 1
        try:
            seen = self._number
            yield await self.read()
            while not self._closed:
                if seen == self._number:
                    await self._news.wait()
                else:
                    seen = self._number
                    yield self._latest
        finally:
            self._watchers -= 1

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        next_s = time.monotonic() + limits.PAGE_SAMPLE_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_s - time.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if time.monotonic() >= next_s:
                    self._sample()
                    next_s = time.monotonic() + limits.PAGE_SAMPLE_S
                    if self._watchers:
                        self._owner = await self._gauges.owner()
                if self._watchers:
                    self._latest = self._snapshot()
                    self._tell()
            except Exception:  # whoever serves is not to suffer from what only looks, and the next second may be better
                log.exception("no snapshot")
            await asyncio.sleep(limits.PAGE_PAUSE_S)

    def _tell(self) -> None:
        self._number += 1
        self._news.set()
        self._news = asyncio.Event()

    def _on_change(self) -> None:
        self._changes.look(self._roster.lanes(), time.monotonic())
        self._wake.set()

    def _sample(self) -> None:
        answered = self._journal.answered()
        totals = {}
        for lane, of_lane in self._gauges.state(None).totals.items():
            waited = of_lane["ngram_rows"] - of_lane["ngram_cache_hits"] - of_lane["ngram_prefetch_hits"]
            drafts, right = (sum(of_lane[f"{name}_at_{place}"] for place in _PLACES) for name in _DRAFTS)
            totals[lane] = {
                **of_lane,
                ANSWERED: answered.get(lane, 0),
                "ngram_waited": max(0, waited),
                "drafts_right": right,
                "drafts_wrong": max(0, drafts - right),
            }
        self._history.add(Sample(time.monotonic(), totals))

    def _snapshot(self) -> str:
        state, now_s = self._gauges.state(self._owner), time.monotonic()
        return dump(
            Moment(
                now_s=now_s,
                wall_s=time.time(),
                started_s=self._started_s,
                server=self._server,
                state=state,
                samples=self._history.samples,
                living=tuple(self._journal.living.values()),
                failures=tuple(self._journal.failures),
                first_tokens=tuple(self._journal.first_tokens),
                changes=tuple(self._changes.latest),
                since_s=self._since_s(state, now_s),
                outcomes=self._outcomes(),
            )
        )

    def _since_s(self, state: State, now_s: float) -> dict[str, float]:
        return {lane.name: self._changes.since_s(lane.name, now_s) for lane in state.lanes}


def dump(moment: Moment) -> str:
    """As it is sent: one line, no NaN."""
    return json.dumps(snapshot(moment), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
