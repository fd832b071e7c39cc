"""The roster: the fleet's eyes and hands. It watches supervisor and lanes, and gives the request side its views.

    supervisor.sock ──snapshots──▶ ┌────────┐ ──views, clients──▶ doors, dispatch
    lane-k.sock ──Hello, Watch───▶ │ roster │ ◀─report_suspect──
    owner.sock ──status──────────▶ │        │
                                   └────────┘ ──start, kill──▶ supervisor
                             (decisions: fleet.Fleet)

One per host; those of other hosts are put together in `hosts`, and their views say HOST/lane-k.

Not here: decisions (fleet), requests (dispatch). Invariant: one life of a lane has one client, and a view is "ready"
only when that life has answered Hello with its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from coordinator import limits
from coordinator.errors import LaneError, LaneRejected, OperationFailed
from coordinator.fleet.lane_client import LaneClient
from coordinator.fleet.lane_view import LaneView, ModelView, PrefixNews, RegionView, step_times
from coordinator.fleet.link import Link
from coordinator.fleet.memory import FleetMemory
from coordinator.fleet.states import OWNER, Action, Fleet, Kill, Progress, Said, Start
from coordinator.fleet.subscribers import Subscribers
from coordinator.host.owner_status import OwnerStatus
from coordinator.host.supervisor_client import SeenProcess, SupervisorClient, SupervisorUnavailable
from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from coordinator.tasks import Tasks
from laneproto.v1 import lane_pb2

log = structlog.get_logger()

_SAID = {lane_pb2.LANE_STATE_STARTING: Said.WARMING, lane_pb2.LANE_STATE_DRAINING: Said.DRAINING}


@dataclass(slots=True)
class _Lane:
    """One life of a lane: a new one with every start."""

    name: str
    address: str
    starts: int
    client: LaneClient
    follower: asyncio.Task[None] | None = None
    hello: lane_pb2.HelloReply | None = None
    model: ModelView | None = None
    status: lane_pb2.LaneStatus = field(default_factory=lane_pb2.LaneStatus)


class FleetRoster:
    """Implements `lane_view.Roster` for one host. Use as an async context manager; all methods belong to that event
    loop, and take lanes by their names on that host."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        fleet: Fleet | None = None,
        *,
        owner: Callable[[], Awaitable[OwnerStatus | None]] | None = None,
        memory: FleetMemory | None = None,
        link: Link | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        self._supervisor = supervisor
        self._owner = owner  # how to ask it; None: its life is only what the supervisor says
        self._region: OwnerStatus | None = None  # what it said last
        self._link = link  # None: the processes of this host
        self._prefix = f"{link.host}/" if link else ""  # of the names that others know lanes by
        self._fingerprint = fingerprint  # that lanes must serve, when it is known
        self._fleet = fleet or Fleet()
        self._lanes: dict[str, _Lane] = {}
        self._views: tuple[LaneView, ...] = ()
        self._subscribers = Subscribers()
        self._on_prefixes: Callable[[PrefixNews], None] = lambda news: None
        self._tasks = Tasks()
        self._memory = memory

    async def __aenter__(self) -> FleetRoster:
        if self._memory is not None:
            self._fleet.recall(self._memory.load())
        self._tasks.spawn(self._follow_supervisor())
        self._tasks.spawn(self._keep_time())
        if self._owner is not None:
            self._tasks.spawn(self._follow_owner(self._owner))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.cancel()
        for lane in self._lanes.values():
            await lane.client.close()

    # --- what the request side sees -----------------------------------------------------------------------------------

    def lanes(self) -> Sequence[LaneView]:
        """All lanes, in the supervisor's order, as of the last change."""
        return self._views

    def client(self, name: str) -> LaneClient:
        """The client of the lane's current life."""
        return self._lanes[name].client

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback()` after every change of a lane's state or life; the returned function ends it."""
        return self._subscribers.add(callback)

    def owner_restarts(self) -> int:
        """How often the region's owner was started again."""
        return self._fleet.restarts(OWNER)

    def regions(self) -> Sequence[RegionView]:
        """The one of this host."""
        return (RegionView(self._link.host if self._link else "", self._region, self.owner_restarts()),)

    def report_suspect(self, name: str) -> None:
        """No new work for this lane until it gives its next sign of life."""
        log.warning("lane suspected", lane=name)
        self._fleet.suspected(name)
        self._publish()

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        """`callback` with all that lanes say they remember, from now on."""
        self._on_prefixes = callback

    # --- what operators do: see operations ----------------------------------------------------------------------------

    def drain(self, name: str, *, returns: bool) -> None:
        """No new work; `returns`: it will be undrained soon."""
        self._fleet.drain(name, returns=returns)
        self._publish()

    def undrain(self, name: str) -> None:
        """Into service again; started if it does not run."""
        self._fleet.undrain(name, time.monotonic())
        self._publish()

    async def stop(self, name: str) -> None:
        """End its process, as when the cluster stops. `OperationFailed` when the supervisor could not."""
        await self._ask(self._supervisor.stop(name, limits.LANE_STOP_S))
        await self._until(lambda: self._fleet.pid(name) == 0)

    async def add_lane(self) -> str:
        """One more lane; its name."""
        name: str = await self._ask(self._supervisor.add_lane())
        await self._until(lambda: name in self._lanes)
        return name

    async def remove_lane(self, name: str) -> None:
        """Forget a lane that does not run."""
        await self._ask(self._supervisor.remove_lane(name))
        await self._until(lambda: name not in self._lanes)

    async def _ask(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except SupervisorUnavailable as error:
            raise OperationFailed(str(error)) from None

    async def _until(self, seen: Callable[[], bool]) -> None:
        """Until the supervisor's news are here."""
        news = asyncio.Event()
        unsubscribe = self.subscribe(news.set)
        try:
            async with asyncio.timeout(limits.CALL_TIMEOUT_S):
                while not seen():
                    await news.wait()
                    news.clear()
        except TimeoutError:
            raise OperationFailed("the supervisor did it, but does not say so") from None
        finally:
            unsubscribe()

    # --- watching -----------------------------------------------------------------------------------------------------

    async def _follow_supervisor(self) -> None:
        while True:
            try:
                async for processes in self._supervisor.watch():
                    self._take_over(processes)
            except SupervisorUnavailable as error:
                log.warning("supervisor lost", reason=str(error))
                await asyncio.sleep(limits.SUPERVISOR_RETRY_S)

    def _take_over(self, processes: Iterable[SeenProcess]) -> None:
        kept = [process for process in processes if process.name != "coordinator"]
        lanes = [process for process in kept if process.address]
        answering = {lane.name for lane in lanes} | ({OWNER} if self._owner else set())
        self._fleet.observe({process.name: process.observed for process in kept}, answering, time.monotonic())
        for gone in self._lanes.keys() - {lane.name for lane in lanes}:
            self._end(self._lanes.pop(gone))
        for process in lanes:
            known = self._lanes.get(process.name)
            if known is None or (process.observed.running and known.starts != process.observed.starts):
                self._begin(process, known)
            elif not process.observed.running and known.follower is not None:
                known.follower.cancel()
                known.follower = known.hello = known.model = None
        self._publish()

    def _begin(self, process: SeenProcess, before: _Lane | None) -> None:
        if before is not None:
            self._end(before)
        shown, link = self._prefix + process.name, self._link
        address = f"{link.address}/{process.name}" if link else process.address
        client = LaneClient(process.name if link else address, name=shown, link=link)
        lane = _Lane(process.name, address, process.observed.starts, client)
        self._lanes[process.name] = lane
        if process.observed.running:
            lane.follower = self._tasks.spawn(self._follow(lane))

    def _end(self, lane: _Lane) -> None:
        if lane.follower is not None:
            lane.follower.cancel()
        self._tasks.spawn(lane.client.close())

    async def _follow(self, lane: _Lane) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._follow_lane(lane))
            both.create_task(self._follow_prefixes(lane))

    async def _follow_lane(self, lane: _Lane) -> None:
        """Hello and Watch, again and again, until this life is over."""
        while True:
            try:
                hello = await lane.client.hello(timeout_s=limits.CALL_TIMEOUT_S)
                if self._fingerprint and hello.model.fingerprint not in (b"", self._fingerprint):
                    raise LaneRejected(f"{lane.client.name} serves another pack")
                if lane.hello is None or lane.hello.incarnation != hello.incarnation:
                    log.info("lane answers", lane=lane.name, pid=hello.pid, device=hello.device)
                lane.hello, lane.model = hello, ModelView.of(hello.model)
                self._sign_of_life(lane, hello.status)
                async for status in lane.client.watch():
                    was_starting = lane.status.state == lane_pb2.LANE_STATE_STARTING
                    if was_starting and status.state != lane_pb2.LANE_STATE_STARTING:
                        break  # ask again: what was said while it was starting may be incomplete
                    self._sign_of_life(lane, status)
            except LaneError:
                self._fleet.suspected(lane.name)
                self._publish()
            await asyncio.sleep(limits.LANE_RETRY_S)

    async def _follow_prefixes(self, lane: _Lane) -> None:
        """What it remembers, for as long as this life; what cannot be heard only makes placement worse."""
        while True:
            with contextlib.suppress(LaneError):
                if lane.hello is not None:
                    seat = Seat(self._prefix + lane.name, lane.hello.incarnation)
                    anew = True
                    async for event in lane.client.prefixes():
                        self._on_prefixes(prefix_news(seat, event, anew=anew))
                        anew = False
            await asyncio.sleep(limits.PREFIXES_RETRY_S)

    async def _follow_owner(self, ask: Callable[[], Awaitable[OwnerStatus | None]]) -> None:
        """Asks for its status again and again: lanes that start later need an owner that answers."""
        while True:
            status = None
            with contextlib.suppress(SupervisorUnavailable):
                status = await ask()
            self._region = status
            if status is not None:
                self._fleet.answered(OWNER, time.monotonic())
            self._fleet.owner_ready(status is not None and status.state == "ready", time.monotonic())
            await asyncio.sleep(limits.OWNER_ASK_S)

    def _sign_of_life(self, lane: _Lane, status: lane_pb2.LaneStatus) -> None:
        lane.status = status
        said = _SAID.get(status.state, Said.READY)
        self._fleet.answered(lane.name, time.monotonic(), progress_of(status), said)
        self._publish()

    # --- acting -------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            for action in self._fleet.tick(time.monotonic()):
                self._tasks.spawn(self._carry_out(action))
            self._publish()
            await asyncio.sleep(limits.FLEET_TICK_S)

    async def _carry_out(self, action: Action) -> None:
        try:
            match action:
                case Start(name):
                    log.info("starting again", process=name)
                    await self._supervisor.start(name)
                case Kill(name, reason):
                    log.error("killed", process=name, reason=reason)
                    await self._supervisor.stop(name, 0.0)
        except SupervisorUnavailable as error:
            log.error("the supervisor could not do it", process=action.name, reason=str(error))
            self._fleet.failed(action, time.monotonic())

    def _view(self, lane: _Lane) -> LaneView:
        return LaneView(
            name=self._prefix + lane.name,
            address=lane.address,
            state=self._fleet.phase(lane.name).value,
            incarnation=lane.hello.incarnation if lane.hello else b"",
            model=lane.model,
            restarts=self._fleet.restarts(lane.name),
            pid=self._fleet.pid(lane.name),
            returns=self._fleet.returns(lane.name),
            device=lane.hello.device if lane.hello else "",
            counters=lane.status.counters,
            steps=step_times(lane.status),
            resident_sequences=lane.status.resident_sequences,
            cached_experts=tuple(lane.status.cached_experts),
            layer_experts=lane.status.layer_experts,
            decode_ns=tuple((times.rows, times.mean_ns) for times in lane.status.decode_times),
        )

    def _publish(self) -> None:
        """Call the subscribers when anything but counters has changed."""
        if self._memory is not None:
            self._memory.save(self._fleet.remember())
        views = tuple(self._view(lane) for lane in self._lanes.values())
        changed = [(v.name, v.state, v.incarnation, v.restarts, v.pid) for v in views] != [
            (v.name, v.state, v.incarnation, v.restarts, v.pid) for v in self._views
        ]
        self._views = views
        if changed:
            self._subscribers.tell()


def prefix_news(seat: Seat, event: lane_pb2.PrefixEvent, *, anew: bool) -> PrefixNews:
    """From the wire."""
    added = [Prefix(each.chain, each.tokens, each.place == lane_pb2.PREFIX_PLACE_PARKED) for each in event.added]
    return PrefixNews(seat, added, [Prefix(each.chain, each.tokens) for each in event.removed], anew)


def progress_of(status: lane_pb2.LaneStatus) -> Progress | None:
    """How long the lane's step has stood still, by the lane's own clock; None while none runs."""
    if not status.HasField("step"):
        return None
    return Progress(max(0, status.stamp_ns - status.step.progress_ns) / 1e9, status.step.p99_ns / 1e9)
