"""Lanes are drained, restarted, added and removed while streams run; what stands still is noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator import limits
from coordinator.dispatch import Dispatcher
from coordinator.errors import LaneNotFound, OperationFailed
from coordinator.fleet.hosts import Hosts
from coordinator.fleet.memory import FleetMemory
from coordinator.fleet.operations import Operations
from coordinator.fleet.other_host import OtherHosts
from coordinator.fleet.roster import FleetRoster
from coordinator.fleet.states import Fleet, FleetLimits
from coordinator.host.supervisor import Managed, Supervisor, serve_keepers
from coordinator.host.supervisor_client import SupervisorClient
from coordinator.launchers.base import ProcessSpec
from coordinator.launchers.local import LocalLauncher
from laneproto.v1 import lane_pb2
from tests.fakes.dispatching import made_up, read_all, request
from tests.fault.test_fleet_processes import QUICK, ROOT, fake_lane, folder, states, supervised, until

assert folder  # a fixture


@asynccontextmanager
async def operated(folder: Path, fleet_limits: FleetLimits = QUICK):
    client = SupervisorClient(f"unix:{folder}/supervisor.sock")
    own = FleetRoster(client, Fleet(fleet_limits), memory=FleetMemory(folder / "fleet.json"))
    async with own, Hosts(own, OtherHosts(folder, None, b"").open) as roster:
        dispatcher = Dispatcher(roster)
        yield roster, dispatcher, Operations(roster, dispatcher.running)
        await dispatcher.close()
    await client.close()


def ready(roster, *names: str) -> bool:
    return states(roster) == dict.fromkeys(names, "ready")


async def finished(steps) -> list:
    return [step async for step in steps]


@pytest.mark.parametrize("lanes", [1, 2])
async def test_a_rolling_restart_drops_no_stream_and_refuses_nobody(folder: Path, lanes: int) -> None:
    names = [f"lane-{k}" for k in range(lanes)]
    processes = [fake_lane(folder, name, "--token-delay-s", "0.01") for name in names]
    async with supervised(folder, *processes), operated(folder) as (roster, dispatcher, operations):
        await until(roster, lambda: ready(roster, *names))
        before = {view.name: view.incarnation for view in roster.lanes()}
        running = [dispatcher.submit(request((5 + k,), 60)) for k in range(lanes)]
        for generation in running:
            await generation.read()
        restart = asyncio.create_task(finished(operations.restart(())))
        await until(roster, lambda: "draining" in states(roster).values())
        waiting = [dispatcher.submit(request((50 + k,), 5)) for k in range(3)]
        for generation in (*running, *waiting):
            ids, end = await read_all(generation)
            assert ids == made_up(generation.request.prompt_ids, generation.request.max_tokens)
            assert end.reason == lane_pb2.FINISH_REASON_LENGTH
        async with asyncio.timeout(60):
            steps = await restart
        assert [step.lane for step in steps if step.doing == "done"] == names
        assert ready(roster, *names)
        assert all(view.incarnation != before[view.name] for view in roster.lanes())


async def test_drained_and_undrained_and_drained_for_the_next_coordinator_too(folder: Path) -> None:
    processes = [fake_lane(folder, "lane-0"), fake_lane(folder, "lane-1")]
    async with supervised(folder, *processes):
        async with operated(folder) as (roster, dispatcher, operations):
            await until(roster, lambda: ready(roster, "lane-0", "lane-1"))
            await finished(operations.drain("lane-0", stop=False))
            assert states(roster) == {"lane-0": "draining", "lane-1": "ready"}
            for _ in range(2):
                generation = dispatcher.submit(request())
                await read_all(generation)
                assert generation.lane == "lane-1"
            with pytest.raises(LaneNotFound):
                await finished(operations.drain("lane-7", stop=False))
        async with operated(folder) as (roster, dispatcher, operations):
            await until(roster, lambda: states(roster) == {"lane-0": "draining", "lane-1": "ready"})
            operations.undrain("lane-0")
            await until(roster, lambda: ready(roster, "lane-0", "lane-1"))
            await finished(operations.drain("lane-0", stop=True))
            assert next(view.pid for view in roster.lanes()) == 0
            operations.undrain("lane-0")
            await until(roster, lambda: ready(roster, "lane-0", "lane-1"))


async def test_a_coordinator_that_dies_in_a_restart_leaves_no_lane_stopped(folder: Path) -> None:
    async with supervised(folder, fake_lane(folder, "lane-0")):
        async with operated(folder) as (roster, _, operations):
            await until(roster, lambda: ready(roster, "lane-0"))
            roster.undrain = lambda name: None  # it is dead before it gets there
            restart = asyncio.create_task(finished(operations.restart(())))
            await until(roster, lambda: roster.lanes()[0].pid == 0)
            restart.cancel()
        async with operated(folder) as (roster, dispatcher, _):
            await until(roster, lambda: ready(roster, "lane-0"))
            await read_all(dispatcher.submit(request()))
            assert not roster.lanes()[0].returns


async def test_quarantine_outlives_the_coordinator_and_ends_on_request(folder: Path) -> None:
    broken = folder / "broken"
    broken.touch()
    script = (
        f"import os, sys; os.path.exists({str(broken)!r}) and sys.exit(3); from tests.fakes.lane import main; main()"
    )
    whole = fake_lane(folder, "lane-0")
    argv = (sys.executable, "-c", script, *whole.spec.argv[3:])
    lane = Managed(ProcessSpec("lane-0", argv, whole.spec.env, whole.spec.log_path), whole.address)
    async with supervised(folder, lane) as supervisor:
        async with operated(folder) as (roster, _, _operations):
            await until(roster, lambda: states(roster) == {"lane-0": "quarantined"})
        async with operated(folder) as (roster, _, operations):
            await until(roster, lambda: states(roster) == {"lane-0": "quarantined"})
            assert supervisor.keepers["lane-0"].starts == 3
            broken.unlink()
            operations.undrain("lane-0")
            await until(roster, lambda: ready(roster, "lane-0"))
            assert supervisor.keepers["lane-0"].starts == 4


async def test_lanes_are_added_and_removed_while_others_serve(folder: Path) -> None:
    supervisor = Supervisor(
        [fake_lane(folder, "lane-0", "--token-delay-s", "0.01")],
        LocalLauncher(),
        plan_lane=lambda number: fake_lane(folder, f"lane-{number}", "--token-delay-s", "0.01"),
    )
    server = await serve_keepers(supervisor, folder / "supervisor.sock")
    await supervisor.start_all()
    async with operated(folder) as (roster, dispatcher, operations):
        await until(roster, lambda: ready(roster, "lane-0"))
        assert await operations.add() == "lane-1"
        await until(roster, lambda: ready(roster, "lane-0", "lane-1"))
        running = [dispatcher.submit(request((5 + k,), 50)) for k in range(2)]
        for generation in running:
            await generation.read()
        steps = await finished(operations.remove("lane-1"))
        assert [step.doing for step in steps][-2:] == ["stopping", "done"]
        assert ready(roster, "lane-0")
        for generation in running:
            assert (await read_all(generation))[1].reason == lane_pb2.FINISH_REASON_LENGTH
        with pytest.raises(OperationFailed, match="last lane"):
            await finished(operations.remove("lane-0"))
        assert set(supervisor.keepers) == {"lane-0"}
    await supervisor.close()
    await server.stop(0.0)


async def test_a_lane_that_is_frozen_before_it_answers_is_started_again(folder: Path) -> None:
    lane = fake_lane(folder, "lane-0", "--start-delay-s", "1")
    quick = FleetLimits(backoff_first_s=0.1, own_stall_s=60.0, start_s=4.0)
    async with supervised(folder, lane) as supervisor, operated(folder, quick) as (roster, _, _operations):
        os.kill(supervisor.keepers["lane-0"].pid, signal.SIGSTOP)
        await until(roster, lambda: states(roster).get("lane-0") == "starting")
        await until(roster, lambda: states(roster).get("lane-0") == "ready")
        assert roster.lanes()[0].restarts >= 1


async def test_a_frozen_coordinator_is_killed_and_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PING_S", 0.1), ("PING_TIMEOUT_S", 0.3), ("COORDINATOR_SILENT_S", 1.5), ("OWN_STALL_S", 60.0)):
        monkeypatch.setattr(limits, name, value)
    argv = (sys.executable, "-m", "tests.fakes.coordinator", str(folder / "coordinator.sock"))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    spec = ProcessSpec("coordinator", argv, env, folder / "coordinator.log")
    supervisor = Supervisor([Managed(spec, ping=f"unix:{folder}/coordinator.sock")], LocalLauncher(), QUICK)
    await supervisor.start_all()
    keeper = supervisor.keepers["coordinator"]
    async with asyncio.timeout(60):
        while "pinged" not in keeper.log_tail():
            await asyncio.sleep(0.05)
        frozen = keeper.pid
        os.kill(frozen, signal.SIGSTOP)
        while keeper.starts < 2 or "pinged" not in keeper.log_tail():
            await asyncio.sleep(0.05)
        assert keeper.pid != frozen
        await asyncio.sleep(1.0)
        assert keeper.starts == 2  # who answers is left alone
    await supervisor.close()
