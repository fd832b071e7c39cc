"""Opens the roster of a host that joined: its supervisor and lanes through the link, its crashes remembered in a file.

Not here: when (hosts). Invariant: what is remembered of a host holds for one life of its supervisor, whose counts it
continues; a new life begins with nothing.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator.fleet.hosts import Answered
from coordinator.fleet.link import Link
from coordinator.fleet.memory import FleetMemory
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.states import Fleet, FleetLimits
from coordinator.host.identity import Identity, certificate_of
from coordinator.host.owner_status import OwnerStatus
from coordinator.host.supervisor_client import SupervisorClient


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """What is the same for all of them. `open` is an `OpenRoster`."""

    run_dir: Path
    identity: Identity | None  # None: no host can join
    fingerprint: bytes
    fleet_limits: FleetLimits = FleetLimits()  # noqa: RUF009  frozen

    def open(
        self, name: str, address: str, incarnation: bytes, answered: Answered, ends: AsyncExitStack
    ) -> FleetRoster:
        """`answered` is called whenever its supervisor answers; what has to be closed later goes into `ends`."""
        assert self.identity is not None, "there is no door without one"
        link = Link(name, certificate_of(name), address, self.identity)
        supervisor = SupervisorClient(link)
        ends.push_async_callback(supervisor.close)

        async def owner() -> OwnerStatus | None:
            status = await supervisor.region()
            answered()
            return status

        path = self.run_dir / f"fleet@{name}@{incarnation.hex()}.json"
        for old in self.run_dir.glob(f"fleet@{name}@*.json"):
            if old != path:
                old.unlink(missing_ok=True)
        return FleetRoster(
            supervisor,
            Fleet(self.fleet_limits),
            owner=owner,
            memory=FleetMemory(path),
            link=link,
            fingerprint=self.fingerprint,
        )
