"""Two hosts as one cluster: TLS, gate, joining and leaving are real; the lanes are simulated, the wire can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from coordinator import limits
from coordinator.config import Address, choose_address
from coordinator.dispatch import Dispatcher
from coordinator.doors.hosts import Served, host_door
from coordinator.errors import CoordinatorError, LaneNotFound, OperationFailed
from coordinator.fleet.hosts import Hosts
from coordinator.fleet.lane_view import RegionView
from coordinator.fleet.operations import Operations
from coordinator.fleet.other_host import OtherHosts
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.states import Fleet
from coordinator.host import authority
from coordinator.host.gate import Gate
from coordinator.host.identity import DOMAIN, Identity
from coordinator.host.joiner import Joined, Joiner
from coordinator.host.supervisor import Supervisor
from coordinator.host.supervisor_client import SupervisorClient
from laneproto.v1 import hosts_pb2, hosts_pb2_grpc, keeper_pb2, keeper_pb2_grpc
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.handoff import RegionStatus
from tests.fakes.dispatching import made_up, read_all, request
from tests.fakes.wire import Wire
from tests.fault.test_fleet_processes import QUICK, fake_lane, folder, states, supervised, until

assert folder  # a fixture

SERVED = Served.of(b"f" * 32, {"--kv": "exact", "--drafts": "2"})
SLOW = ("--token-delay-s", "0.01")
CUT_OFF_S = 2.5  # as the fleet's own limit in these tests


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOST_SILENT_S", CUT_OFF_S), ("JOIN_S", 0.1), ("OWNER_ASK_S", 0.1), ("LANE_SUSPECT_S", 0.5)):
        monkeypatch.setattr(limits, name, value)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids")
    authority.create(path)
    authority.invite(path, "b")
    return path


@dataclass
class Head:
    """The coordinator's host."""

    hosts: Hosts
    dispatcher: Dispatcher
    operations: Operations
    door: Address


@contextlib.asynccontextmanager
async def head(folder: Path, ids: Path, *options: str) -> AsyncIterator[Head]:
    """With one lane of its own."""
    (folder / "a").mkdir(exist_ok=True)
    client = SupervisorClient(f"unix:{folder}/a/supervisor.sock")
    identity = Identity.load(ids / "head.pem")
    others = OtherHosts(folder / "a", identity, b"", QUICK)
    async with (
        supervised(folder / "a", fake_lane(folder / "a", "lane-0", *(options or SLOW))),
        FleetRoster(client, Fleet(QUICK)) as own,
        Hosts(own, others.open) as hosts,
    ):
        dispatcher = Dispatcher(hosts)
        try:
            async with host_door(hosts, SERVED, dispatcher.running, identity, Address("127.0.0.1")) as door:
                await until(hosts, lambda: states(hosts) == {"lane-0": "ready"})
                yield Head(hosts, dispatcher, Operations(hosts, dispatcher.running), door)
        finally:
            await dispatcher.close()
            await client.close()


@dataclass
class Other:
    """The host that joins; its wires can be cut."""

    supervisor: Supervisor
    joiner: Joiner
    wires: tuple[Wire, Wire]
    said: list[Joined | None]

    def cut(self) -> None:
        for wire in self.wires:
            wire.cut()

    def mend(self) -> None:
        for wire in self.wires:
            wire.mend()


@contextlib.asynccontextmanager
async def other(folder: Path, ids: Path, door: Address, suffix: str = "") -> AsyncIterator[Other]:
    (folder / "b").mkdir(exist_ok=True)
    identity, at = Identity.load(ids / "b.pem"), choose_address(Address("127.0.0.1"))
    gate = Gate(identity, folder / "b")
    async with (
        supervised(folder / "b", fake_lane(folder / "b", "lane-0", *SLOW)) as supervisor,
        Wire((at.host, at.port)) as inward,
        Wire((door.host, door.port)) as outward,
    ):
        await gate.open(at)
        target = f"127.0.0.1:{outward.port}"
        async with Joiner(target, identity, SERVED, Address("127.0.0.1", inward.port), suffix) as joiner:
            found = Other(supervisor, joiner, (inward, outward), [])
            staying = asyncio.create_task(joiner.stay(found.said.append))
            try:
                yield found
                assert not staying.done() or staying.result()
            finally:
                staying.cancel()
                await asyncio.gather(staying, return_exceptions=True)
                await gate.close()


BOTH = {"lane-0": "ready", "b/lane-0": "ready"}


async def streams(found: Head, count: int = 2, tokens: int = 400) -> list[asyncio.Task]:
    """As many requests as there are lanes, each with tokens already."""
    generations = [found.dispatcher.submit(request((5 + k,), tokens)) for k in range(count)]
    for generation in generations:
        await generation.read()
    return generations


async def test_a_host_joins_serves_is_cut_off_and_comes_back(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here, other(folder, ids, here.door) as there:
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        before = {view.name: view for view in here.hosts.lanes()}
        running = await streams(here)
        assert {each.lane for each in running} == set(BOTH)
        there.cut()
        for generation in running:  # the one of the other host goes on here, with the next token
            ids_, _ = await read_all(generation)
            assert ids_ == made_up(generation.request.prompt_ids, 400)[-len(ids_) :]
            assert len(ids_) >= 398
        assert {each.lane for each in running} == {"lane-0"}
        assert states(here.hosts) == {"lane-0": "ready", "b/lane-0": "dead"}
        with pytest.raises(OperationFailed, match="away"):
            here.operations.undrain("b/lane-0")
        there.mend()
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        after = {view.name: view for view in here.hosts.lanes()}
        assert after["b/lane-0"].incarnation == before["b/lane-0"].incarnation  # it never died
        assert after["b/lane-0"].pid == before["b/lane-0"].pid
        for generation in await streams(here, tokens=3):
            await read_all(generation)


async def test_the_region_of_every_host_is_known(folder: Path, ids: Path) -> None:
    said = RegionStatus("filling", "", 30, 100, b"f" * 32, bytes(16), 7)
    (folder / "b").mkdir()
    async with head(folder, ids) as here:
        with DescriptorServer(folder / "b/owner.sock", lambda: (said, None)):
            async with other(folder, ids, here.door) as there:
                await until(here.hosts, lambda: states(here.hosts) == BOTH)
                async with asyncio.timeout(60):
                    while not all(region.owner for region in here.hosts.regions()[1:]):
                        await asyncio.sleep(0.02)
                own, joined = here.hosts.regions()
                assert own == RegionView("", None, 0)
                assert (joined.host, str(joined.owner), joined.restarts) == ("b", "filling 30 %", 0)
                there.cut()
                await until(here.hosts, lambda: states(here.hosts)["b/lane-0"] == "dead")
                assert here.hosts.regions()[1] == RegionView("b", None, 0)


async def test_a_lane_of_another_host_that_dies_is_started_again_there(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here, other(folder, ids, here.door) as there:
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        os.kill(there.supervisor.keepers["lane-0"].pid, signal.SIGKILL)
        await until(here.hosts, lambda: states(here.hosts) != BOTH)
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        assert there.supervisor.keepers["lane-0"].starts == 2
        assert [view.restarts for view in here.hosts.lanes()] == [0, 1]


async def test_operations_reach_lanes_of_another_host(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here, other(folder, ids, here.door) as there:
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        async for _ in here.operations.drain("b/lane-0", stop=False):
            pass
        assert states(here.hosts) == {"lane-0": "ready", "b/lane-0": "draining"}
        generation = here.dispatcher.submit(request())
        await read_all(generation)
        assert generation.lane == "lane-0"
        async for _ in here.operations.restart(["b/"]):
            pass
        assert states(here.hosts) == BOTH
        assert there.supervisor.keepers["lane-0"].starts == 2
        steps = [step async for step in here.operations.drain("b/", stop=True)]
        assert [step.lane for step in steps if step.doing == "done"] == ["b/lane-0"]
        assert here.operations.undrain("b/").lane == "b/lane-0"
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        for unknown in ("c/", "c/lane-0", "/"):
            with pytest.raises(LaneNotFound):
                here.operations.undrain(unknown)
        with pytest.raises(OperationFailed, match="no host"):
            await here.operations.add("c")


async def test_hosts_that_share_a_certificate_are_told_apart(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here, other(folder, ids, here.door, suffix="10-0-0-2") as there:
        await until(here.hosts, lambda: states(here.hosts) == {"lane-0": "ready", "b.10-0-0-2/lane-0": "ready"})
        for generation in await streams(here, tokens=3):
            await read_all(generation)
        await there.joiner.leave(60)


async def test_a_host_leaves_when_its_lanes_are_idle_and_its_patience_has_an_end(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here, other(folder, ids, here.door) as there:
        await until(here.hosts, lambda: states(here.hosts) == BOTH)
        running = await streams(here, tokens=60)
        leaving = asyncio.create_task(there.joiner.leave(60))
        for generation in running:
            ids_, _ = await read_all(generation)
            assert ids_ == made_up(generation.request.prompt_ids, 60)[-len(ids_) :]
        assert {each.lane for each in running} == set(BOTH)  # it was not cut
        async with asyncio.timeout(60):
            await leaving


async def test_who_is_no_member_is_refused_with_a_reason(folder: Path, ids: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    authority.create(strange)
    authority.invite(strange, "b")

    async def refused(identity: Identity, served: Served, door: Address, limit_s: float = 60) -> str:
        async with Joiner(str(door), identity, served, Address("127.0.0.1", 1)) as joiner:
            with pytest.raises(Exception) as caught:  # noqa: PT011  the tree of errors has one of them per case
                async with asyncio.timeout(limit_s):
                    await joiner.stay(lambda joined: None)
        return str(caught.value)

    async with head(folder, ids) as here:
        identity = Identity.load(ids / "b.pem")
        assert "another pack" in await refused(identity, replace(SERVED, fingerprint=b"g" * 32), here.door)
        assert "another version" in await refused(identity, replace(SERVED, version="0"), here.door)
        other_lanes = await refused(identity, replace(SERVED, alike={**SERVED.alike, "--kv": "int8"}), here.door)
        assert "--kv is 'int8' here and 'exact' there" in other_lanes
        assert "--drafts is 'nothing' here and '2' there" in await refused(
            identity, replace(SERVED, alike={"--kv": "exact"}), here.door
        )
        assert "--x is 'y' here" in await refused(
            identity, replace(SERVED, alike={**SERVED.alike, "--x": "y"}), here.door
        )
        assert "no other host" in await refused(Identity.load(ids / "head.pem"), SERVED, here.door)
        await refused(Identity.load(strange / "b.pem"), SERVED, here.door, limit_s=3)  # it never gets an answer
        async with grpc.aio.insecure_channel(str(here.door)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await hosts_pb2_grpc.HostsStub(channel).Join(hosts_pb2.JoinRequest(), timeout=3)
        assert here.hosts.names() == []


async def test_a_certificate_that_was_revoked_is_out_at_once_and_its_name_can_come_back(
    folder: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "own-ids"
    authority.create(ids)
    authority.invite(ids, "b")
    async with head(folder, ids) as here:
        async with other(folder, ids, here.door):
            await until(here.hosts, lambda: states(here.hosts) == BOTH)
            running = await streams(here)
            authority.revoke(ids, "b")
            for generation in running:  # the one of that host goes on here
                ids_, _ = await read_all(generation)
                assert ids_ == made_up(generation.request.prompt_ids, 400)[-len(ids_) :]
            assert {each.lane for each in running} == {"lane-0"}
            assert here.hosts.names() == []
            await asyncio.sleep(3 * limits.JOIN_S)  # it says that it is there, and goes on saying so
            assert here.hosts.names() == []
        authority.invite(ids, "b")
        async with other(folder, ids, here.door):
            await until(here.hosts, lambda: states(here.hosts) == BOTH)
        (ids / "revoked").write_text("anything")
        async with Joiner(str(here.door), Identity.load(ids / "b.pem"), SERVED, Address("127.0.0.1", 1)) as joiner:
            with pytest.raises(CoordinatorError, match="cannot read"):
                await joiner.stay(lambda joined: None)


async def test_the_size_of_what_a_host_says(folder: Path, ids: Path) -> None:
    async with head(folder, ids) as here:
        identity = Identity.load(ids / "b.pem")
        options = [("grpc.ssl_target_name_override", f"head.{DOMAIN}")]
        async with grpc.aio.secure_channel(str(here.door), identity.channel_credentials(), options) as channel:
            stub = hosts_pb2_grpc.HostsStub(channel)
            for over, code in ((0, "FAILED_PRECONDITION"), (1, "RESOURCE_EXHAUSTED")):
                message = hosts_pb2.JoinRequest(version="x" * 4000)
                message.version += "x" * (limits.JOIN_BYTES + over - message.ByteSize())
                assert message.ByteSize() == limits.JOIN_BYTES + over
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Join(message, timeout=60)
                assert caught.value.code().name == code


@pytest.mark.parametrize("asked", ["owner.b", "coordinator.b", "lane-0.c", "../x.b", "supervisor", "lane-1000.b"])
async def test_the_gate_leads_only_to_supervisor_and_lanes_of_its_own_name(folder: Path, ids: Path, asked: str) -> None:
    async with other(folder, ids, Address("127.0.0.1", 1)) as there:
        identity = Identity.load(ids / "head.pem")
        at = f"127.0.0.1:{there.wires[0].port}"
        names = {"right": f"supervisor.b.{DOMAIN}", "wrong": f"{asked}.{DOMAIN}"}
        for which, name in names.items():
            options = [("grpc.ssl_target_name_override", name)]
            async with grpc.aio.secure_channel(at, identity.channel_credentials(), options) as channel:
                call = keeper_pb2_grpc.KeepersStub(channel).Region(keeper_pb2.RegionRequest(), timeout=10)
                if which == "right":
                    assert (await call).state == ""
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call


async def test_the_gate_lets_nobody_but_the_coordinator_through(folder: Path, ids: Path) -> None:
    async with other(folder, ids, Address("127.0.0.1", 1)) as there:
        identity = Identity.load(ids / "b.pem")  # of the same cluster, and not its head
        options = [("grpc.ssl_target_name_override", f"supervisor.b.{DOMAIN}")]
        at = f"127.0.0.1:{there.wires[0].port}"
        async with grpc.aio.secure_channel(at, identity.channel_credentials(), options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await keeper_pb2_grpc.KeepersStub(channel).Region(keeper_pb2.RegionRequest(), timeout=3)


async def test_how_many_hosts_and_one_of_a_name(folder: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOSTS", 2)
    monkeypatch.setattr(limits, "LANE_SUSPECT_S", 60.0)
    async with head(folder, ids) as here:
        for name in ("b", "c"):
            assert await here.hosts.join(name, "127.0.0.1:1", b"1" * 16) == ()
        with pytest.raises(OperationFailed, match="2 hosts"):
            await here.hosts.join("d", "127.0.0.1:1", b"1" * 16)
        with pytest.raises(Exception, match="is here already"):
            await here.hosts.join("b", "127.0.0.1:2", b"2" * 16)
        await here.hosts.forget("b")
        await here.hosts.join("b", "127.0.0.1:2", b"2" * 16)
        assert here.hosts.names() == ["c", "b"]
