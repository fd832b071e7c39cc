"""A roster of simulated lanes: implements `coordinator.fleet.lane_view.Roster` without processes or a supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coordinator.fleet.lane_client import LaneClient
from coordinator.fleet.lane_view import LaneState, LaneView, ModelView, PrefixNews, RegionView
from coordinator.fleet.subscribers import Subscribers
from laneproto.v1 import lane_pb2
from tests.fakes.lane import FakeLane


class FakeRoster:
    """Views of `lanes`, all ready until a test says otherwise. `suspects` keeps what was reported."""

    def __init__(self, *lanes: FakeLane) -> None:
        self.fakes = {lane.name: lane for lane in lanes}
        self.suspects: list[str] = []
        self.known_regions: list[RegionView] = []
        self._clients = {lane.name: LaneClient(lane.address, name=lane.name) for lane in lanes}
        self._views: dict[str, LaneView] = {}
        self._subscribers = Subscribers()
        for lane in lanes:
            self._see(lane)

    def lanes(self) -> list[LaneView]:
        return list(self._views.values())

    def client(self, name: str) -> LaneClient:
        return self._clients[name]

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        return self._subscribers.add(callback)

    def hear_prefixes(self, callback: Callable[[PrefixNews], None]) -> None:
        self.tell = callback

    def regions(self) -> list[RegionView]:
        return self.known_regions

    def owner_restarts(self) -> int:
        return 2

    def report_suspect(self, name: str) -> None:
        self.suspects.append(name)

    def set_state(self, name: str, state: LaneState) -> None:
        """As the fleet would see a lane change."""
        self._views[name] = replace(self._views[name], state=state)
        self._notify()

    def hear(self, **fields: object) -> None:
        """As if every lane's Watch had just told its counters; subscribers are not told, as with the real one.

        `fields`: what else it told, as the view has it.
        """
        for name, fake in self.fakes.items():
            counters = lane_pb2.Counters()
            counters.CopyFrom(fake.counters)
            self._views[name] = replace(self._views[name], counters=counters, **fields)  # type: ignore[arg-type]

    def lose(self, name: str, state: LaneState = "dead") -> None:
        """The process is gone."""
        self._views[name] = replace(self._views[name], state=state, incarnation=b"", model=None)
        self._notify()

    async def returned(self, name: str) -> None:
        """The lane answers again, as a new process with a new client."""
        old, fake = self._clients[name], self.fakes[name]
        self._clients[name] = LaneClient(fake.address, name=name)
        self._see(fake)
        self._notify()
        await old.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _see(self, lane: FakeLane) -> None:
        self._views[lane.name] = LaneView(
            lane.name, lane.address, "ready", lane.incarnation, ModelView.of(lane.model), pid=1, device="cpu"
        )

    def _notify(self) -> None:
        self._subscribers.tell()
