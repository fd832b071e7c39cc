"""Roster and fleet over a real supervisor and simulated lanes that are really killed, stopped and replaced."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.errors import LaneError
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.states import Fleet, FleetLimits
from coordinator.host.owner_status import ask_owner
from coordinator.host.supervisor import Managed, Supervisor, serve_keepers
from coordinator.host.supervisor_client import SupervisorClient
from coordinator.launchers.base import ProcessSpec
from coordinator.launchers.local import LocalLauncher
from laneproto.v1 import lane_pb2

ROOT = Path(__file__).parents[2]
QUICK = FleetLimits(backoff_first_s=0.1, backoff_max_s=0.5, suspect_after_s=1.5, kill_after_s=2.5, own_stall_s=60.0)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="exw-") as path:
        yield Path(path)


def fake_lane(folder, name, *options):
    address = f"unix:{folder}/{name}.sock"
    argv = (sys.executable, "-m", "tests.fakes.lane", "--listen", address, "--name", name, *options)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    return Managed(ProcessSpec(name, argv, env, folder / f"{name}.log"), address)


@asynccontextmanager
async def supervised(folder, *processes):
    supervisor = Supervisor(processes, LocalLauncher())
    server = await serve_keepers(supervisor, folder / "supervisor.sock", folder / "owner.sock")
    await supervisor.start_all()
    try:
        yield supervisor
    finally:
        await supervisor.close()
        await server.stop(0.0)


@asynccontextmanager
async def rostered(folder):
    client = SupervisorClient(f"unix:{folder}/supervisor.sock")
    async with FleetRoster(client, Fleet(QUICK)) as roster:
        yield roster
    await client.close()


def states(roster):
    return {view.name: view.state for view in roster.lanes()}


async def until(roster, condition):
    """Waits for the subscription, not for a clock."""
    changed = asyncio.Event()
    end = roster.subscribe(changed.set)
    try:
        async with asyncio.timeout(60):
            while not condition():
                await changed.wait()
                changed.clear()
    finally:
        end()


async def test_a_killed_lane_comes_back_with_another_incarnation_and_the_other_is_untouched(folder):
    async with supervised(folder, fake_lane(folder, "lane-0"), fake_lane(folder, "lane-1")), rostered(folder) as roster:
        await until(roster, lambda: states(roster) == {"lane-0": "ready", "lane-1": "ready"})
        before = {view.name: view for view in roster.lanes()}
        assert before["lane-0"].model.vocab_size == 256
        seen = []
        roster.subscribe(lambda: seen.append(states(roster)))
        os.kill(before["lane-0"].pid, signal.SIGKILL)
        await until(roster, lambda: states(roster).get("lane-0") in ("suspect", "dead"))
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        after = {view.name: view for view in roster.lanes()}
        assert after["lane-0"].incarnation != before["lane-0"].incarnation
        assert (after["lane-0"].restarts, after["lane-0"].pid != before["lane-0"].pid) == (1, True)
        assert (after["lane-1"].incarnation, after["lane-1"].pid) == (
            before["lane-1"].incarnation,
            before["lane-1"].pid,
        )
        assert all(each["lane-1"] == "ready" for each in seen)
        hello = await roster.client("lane-0").hello()
        assert hello.incarnation == after["lane-0"].incarnation


async def test_three_crashes_mean_quarantine_and_no_further_start(folder):
    processes = fake_lane(folder, "lane-0", "--exit-code", "3"), fake_lane(folder, "lane-1")
    async with supervised(folder, *processes) as supervisor, rostered(folder) as roster:
        await until(roster, lambda: states(roster) == {"lane-0": "quarantined", "lane-1": "ready"})
        assert supervisor.keepers["lane-0"].starts == 3
        await asyncio.sleep(1.5)  # three times the longest backoff
        assert supervisor.keepers["lane-0"].starts == 3


async def test_a_stopped_process_is_suspected_then_killed_and_started_again(folder):
    async with supervised(folder, fake_lane(folder, "lane-0")), rostered(folder) as roster:
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        pid = roster.lanes()[0].pid
        os.kill(pid, signal.SIGSTOP)  # neither dead nor alive: connections stay open
        await until(roster, lambda: states(roster).get("lane-0") == "suspect")
        assert roster.lanes()[0].pid == pid
        await until(roster, lambda: states(roster).get("lane-0") == "ready" and roster.lanes()[0].pid != pid)
        assert roster.lanes()[0].restarts == 1


async def test_a_lane_that_answers_but_does_not_get_on_is_suspected_then_killed_and_started_again(folder):
    lane = fake_lane(folder, "lane-0", "--fault", "stick", "--fault-after", "2")
    async with supervised(folder, lane), rostered(folder) as roster:
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        pid = roster.lanes()[0].pid
        request = lane_pb2.GenerateRequest(request_id="r", prompt_ids=[1, 2, 3], max_tokens=9)
        stuck = asyncio.create_task(read(roster.client("lane-0"), request))
        await until(roster, lambda: states(roster).get("lane-0") == "suspect")
        assert roster.lanes()[0].pid == pid  # suspected only
        assert (await roster.client("lane-0").hello()).pid == pid  # it answers
        await until(roster, lambda: states(roster).get("lane-0") == "ready" and roster.lanes()[0].pid != pid)
        assert roster.lanes()[0].restarts == 1
        with pytest.raises(LaneError):
            await stuck


async def test_an_owner_that_stands_still_is_killed_and_started_again(folder):
    socket = folder / "owner.sock"
    argv = (sys.executable, "-m", "tests.fakes.owner", str(socket))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    owner = Managed(ProcessSpec("owner", argv, env, folder / "owner.log"), "")
    async with supervised(folder, owner, fake_lane(folder, "lane-0")) as supervisor:
        client = SupervisorClient(f"unix:{folder}/supervisor.sock")
        async with FleetRoster(client, Fleet(QUICK), owner=lambda: asyncio.to_thread(ask_owner, socket, 1.0)) as roster:
            await until(roster, lambda: states(roster).get("lane-0") == "ready")
            async with asyncio.timeout(60):
                while roster.regions()[0].owner is None:
                    await asyncio.sleep(0.05)
                pid = {each.name: each.pid for each in supervisor.snapshot().processes}["owner"]
                os.kill(pid, signal.SIGSTOP)
                while roster.owner_restarts() == 0:
                    await asyncio.sleep(0.05)
                while ask_owner(socket) is None:
                    await asyncio.sleep(0.05)
            assert states(roster) == {"lane-0": "ready"}
            assert roster.lanes()[0].restarts == 0
        await client.close()


async def read(client, request):
    async for _ in client.generate(request):
        pass


async def test_a_suspected_lane_that_is_well_is_ready_again_without_a_restart(folder):
    async with supervised(folder, fake_lane(folder, "lane-0")), rostered(folder) as roster:
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        before = roster.lanes()[0]
        roster.report_suspect("lane-0")
        assert states(roster).get("lane-0") == "suspect"
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        assert (roster.lanes()[0].incarnation, roster.lanes()[0].restarts) == (before.incarnation, 0)


async def test_a_coordinator_that_returns_takes_living_lanes_over_and_starts_dead_ones(folder):
    async with supervised(folder, fake_lane(folder, "lane-0"), fake_lane(folder, "lane-1")) as supervisor:
        async with rostered(folder) as first:
            await until(first, lambda: states(first) == {"lane-0": "ready", "lane-1": "ready"})
            before = {view.name: view for view in first.lanes()}
        os.kill(before["lane-1"].pid, signal.SIGKILL)  # while there is no coordinator
        async with asyncio.timeout(60):
            while supervisor.keepers["lane-1"].handle is not None:
                await supervisor.change(supervisor.version)
        async with rostered(folder) as second:
            await until(second, lambda: states(second) == {"lane-0": "ready", "lane-1": "ready"})
            after = {view.name: view for view in second.lanes()}
        assert after["lane-0"].incarnation == before["lane-0"].incarnation
        assert (after["lane-0"].restarts, after["lane-1"].restarts) == (0, 1)


async def test_the_owner_is_started_again_like_a_lane(folder):
    owner = Managed(ProcessSpec("owner", ("sleep", "600"), {"PATH": os.environ["PATH"]}, folder / "owner.log"))
    async with supervised(folder, owner, fake_lane(folder, "lane-0")) as supervisor, rostered(folder) as roster:
        await until(roster, lambda: states(roster) == {"lane-0": "ready"})  # the owner is no lane
        os.kill(supervisor.keepers["owner"].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while supervisor.keepers["owner"].starts != 2:
                await supervisor.change(supervisor.version)
        assert states(roster) == {"lane-0": "ready"}


async def test_a_lane_stopped_on_request_is_out_of_service_and_stays_so(folder):
    async with supervised(folder, fake_lane(folder, "lane-0")) as supervisor, rostered(folder) as roster:
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        await supervisor.stop("lane-0", 10.0)
        await until(roster, lambda: states(roster).get("lane-0") == "draining")
        await asyncio.sleep(0.5)
        assert supervisor.keepers["lane-0"].starts == 1
