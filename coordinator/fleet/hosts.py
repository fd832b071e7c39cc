"""The lanes of all hosts as one roster: those of this host, and of every host that joined.

    host ──Join, once a second──▶ ┌───────┐ ──lanes of all, by HOST/lane-k──▶ doors, dispatch, operations
    FleetRoster per host ────────▶ │ hosts │
                                  └───────┘ a silent host's lanes are dead; its roster ends, and with it the streams

A host is there while it says so and its supervisor answers us: two vigils, one for each direction. Not here: how a
host is dialled (link), what its lanes do (roster, states), who may join (doors.hosts). Invariants: one supervisor of a
host at a time; a lane of a host that is away has no incarnation, so nothing waits for its streams; at most
`limits.HOSTS`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import structlog

from coordinator import limits
from coordinator.errors import HostTaken, OperationFailed
from coordinator.fleet.lane_client import LaneClient
from coordinator.fleet.lane_view import LaneView, PrefixNews, RegionView
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.subscribers import Subscribers
from coordinator.host.vigil import Vigil
from coordinator.policy.host_names import split
from coordinator.tasks import Tasks

log = structlog.get_logger()

Answered = Callable[[], None]
OpenRoster = Callable[[str, str, bytes, Answered, AsyncExitStack], FleetRoster]  # name, address, incarnation, …


@dataclass(slots=True)
class _Host:
    """One that has joined: here while it has a roster."""

    name: str
    address: str
    incarnation: bytes
    joined: Vigil  # its words to us
    answers: Vigil  # its supervisor's answers to us
    spoke_at: float
    ends: AsyncExitStack = field(default_factory=AsyncExitStack)
    roster: FleetRoster | None = None
    left: tuple[LaneView, ...] = ()  # its lanes as they were, all dead, while it is away
    draining: bool = False


class Hosts:
    """Implements `lane_view.Roster` over several `FleetRoster`s. Use as an async context manager."""

    def __init__(self, own: FleetRoster, open_roster: OpenRoster, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self._open_roster, self._clock = own, open_roster, clock
        self._hosts: dict[str, _Host] = {}
        self._subscribers = Subscribers()
        self._on_prefixes: Callable[[PrefixNews], None] = lambda news: None
        self._tasks = Tasks()

    async def __aenter__(self) -> Hosts:
        self._own.subscribe(self._tell)
        self._tasks.spawn(self._keep_time())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()
        for host in self._hosts.values():
            await host.ends.aclose()

    # --- hosts --------------------------------------------------------------------------------------------------------

    async def join(self, name: str, address: str, incarnation: bytes) -> Sequence[LaneView]:
        """It is there; its lanes as far as they are known. `HostTaken`: another one is; `OperationFailed`: too many."""
        now, known = self._clock(), self._hosts.get(name)
        if known is not None and known.incarnation != incarnation:
            if known.roster is not None and now - known.spoke_at < limits.LANE_SUSPECT_S:
                raise HostTaken(f"a host {name!r} is here already, at {known.address}")
            await self.forget(name)
            known = None
        if known is None:
            if len(self._hosts) >= limits.HOSTS:
                raise OperationFailed(f"{limits.HOSTS} hosts have joined already")
            known = self._hosts[name] = _Host(name, address, incarnation, _vigil(now), _vigil(now), now)
        known.joined.answered(now)
        known.spoke_at = now
        if known.roster is not None and known.address != address:
            await self._close(known)
        if known.roster is None:
            await self._open(known, address)
        return self.lanes_of(name)

    async def forget(self, name: str) -> None:
        """It is not there any more, and is not expected back."""
        host = self._hosts.pop(name, None)
        if host is not None:
            log.warning("host forgotten", host=name)
            await host.ends.aclose()
            self._tell()

    def draining(self, name: str, incarnation: bytes) -> bool:
        """No new work for any lane of that host, whatever starts there; False: it is not here."""
        host = self._hosts.get(name)
        if host is None or host.incarnation != incarnation:
            return False
        host.draining = True
        for view in self.lanes_of(name):
            self.drain(view.name, returns=False)
        return True

    def names(self) -> list[str]:
        """Of the hosts that have joined, away or not."""
        return list(self._hosts)

    def lanes_of(self, name: str) -> Sequence[LaneView]:
        """The lanes of one of them."""
        host = self._hosts.get(name)
        return () if host is None else host.left if host.roster is None else host.roster.lanes()

    # --- what the request side sees -----------------------------------------------------------------------------------

    def lanes(self) -> Sequence[LaneView]:
        """Those of this host first, then host by host in the order of joining."""
        if not self._hosts:
            return self._own.lanes()
        return tuple(itertools.chain(self._own.lanes(), *map(self.lanes_of, self._hosts)))

    def client(self, name: str) -> LaneClient:
        """The client of the lane's current life. KeyError for one that is away."""
        host, lane = split(name)
        roster = self._roster(host)
        if roster is None:
            raise KeyError(name)
        return roster.client(lane)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` after every change; the returned function ends it."""
        return self._subscribers.add(callback)

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        """`callback` with all that lanes say they remember, from now on."""
        self._on_prefixes = callback
        self._own.hear_prefixes(callback)

    def owner_restarts(self) -> int:
        """How often owners were started again, on hosts that are here."""
        rosters = (host.roster for host in self._hosts.values())
        return self._own.owner_restarts() + sum(roster.owner_restarts() for roster in rosters if roster is not None)

    def regions(self) -> Sequence[RegionView]:
        """Of this host, then of those that have joined."""
        joined = (
            host.roster.regions() if host.roster is not None else (RegionView(host.name, None, 0),)
            for host in self._hosts.values()
        )
        return tuple(itertools.chain(self._own.regions(), *joined))

    def report_suspect(self, name: str) -> None:
        """No new work for this lane until it gives its next sign of life."""
        host, lane = split(name)
        roster = self._roster(host)
        if roster is not None:
            roster.report_suspect(lane)

    # --- what operators do: see operations ----------------------------------------------------------------------------

    def drain(self, name: str, *, returns: bool) -> None:
        """No new work; `returns`: it will be undrained soon."""
        roster, lane = self._at(name)
        roster.drain(lane, returns=returns)

    def undrain(self, name: str) -> None:
        """Into service again; started if it does not run."""
        roster, lane = self._at(name)
        roster.undrain(lane)

    async def stop(self, name: str) -> None:
        """End its process, as when the cluster stops."""
        roster, lane = self._at(name)
        await roster.stop(lane)

    async def add_lane(self, host: str = "") -> str:
        """One more lane on that host; its name."""
        roster, _ = self._at(f"{host}/" if host else "")
        lane = await roster.add_lane()
        return f"{host}/{lane}" if host else lane

    async def remove_lane(self, name: str) -> None:
        """Forget a lane that does not run."""
        roster, lane = self._at(name)
        await roster.remove_lane(lane)

    def _at(self, name: str) -> tuple[FleetRoster, str]:
        """The roster of a lane, and its name there. `OperationFailed` while its host is away."""
        host, lane = split(name)
        roster = self._roster(host)
        if roster is None:
            known = host in self._hosts
            raise OperationFailed(f"host {host!r} is away" if known else f"there is no host {host[:64]!r}")
        return roster, lane

    def _roster(self, host: str) -> FleetRoster | None:
        """Of this host (""), or of one that has joined; None: it is away, or nobody."""
        if not host:
            return self._own
        known = self._hosts.get(host)
        return known.roster if known else None

    # --- coming and going ---------------------------------------------------------------------------------------------

    async def _open(self, host: _Host, address: str) -> None:
        now = self._clock()
        host.address, host.joined, host.answers = address, _vigil(now), _vigil(now)
        ends = AsyncExitStack()

        def answered() -> None:
            host.answers.answered(self._clock())

        roster = self._open_roster(host.name, address, host.incarnation, answered, ends)
        roster.hear_prefixes(lambda news: self._on_prefixes(news))
        roster.subscribe(lambda: self._changed(host))
        await ends.enter_async_context(roster)
        host.ends, host.roster = ends, roster
        log.info("host is here", host=host.name, address=address)
        self._tell()

    async def _close(self, host: _Host) -> None:
        """It is away: its lanes are dead to everybody before the connections to them are closed."""
        if host.roster is None:
            return
        host.left = tuple(
            replace(view, state="dead", incarnation=b"", pid=0, returns=False) for view in host.roster.lanes()
        )
        host.roster = None
        self._tell()
        await host.ends.aclose()

    def _changed(self, host: _Host) -> None:
        if host.draining:
            for view in self.lanes_of(host.name):
                if view.state not in ("draining", "dead", "quarantined"):
                    self.drain(view.name, returns=False)
        self._tell()

    def _tell(self) -> None:
        self._subscribers.tell()

    async def _keep_time(self) -> None:
        while True:
            now = self._clock()
            for host in tuple(self._hosts.values()):
                silent = host.joined.overdue(now), host.answers.overdue(now)
                if host.roster is not None and any(silent):
                    why = "it says nothing" if silent[0] else "its supervisor does not answer"
                    log.error("host is away", host=host.name, address=host.address, reason=why)
                    await self._close(host)
                elif host.roster is None and now - host.spoke_at >= limits.HOST_FORGET_S:
                    await self.forget(host.name)
            await asyncio.sleep(limits.FLEET_TICK_S)


def _vigil(now: float) -> Vigil:
    return Vigil(now, first_s=limits.HOST_SILENT_S, then_s=limits.HOST_SILENT_S, pause_s=limits.FLEET_TICK_S)
