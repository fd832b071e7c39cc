"""Supervisor, local launcher and the keepers' wire, with real processes that do nothing but live and die."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.fleet.states import FleetLimits
from coordinator.host.supervisor import Managed, Supervisor, serve_keepers, trim_log
from coordinator.host.supervisor_client import SupervisorClient, SupervisorUnavailable
from coordinator.launchers.base import ProcessSpec
from coordinator.launchers.local import LocalLauncher
from laneproto.v1 import keeper_pb2, keeper_pb2_grpc

QUICK = FleetLimits(backoff_first_s=0.05, backoff_max_s=0.2)
SLEEPER = ("sleep", "600")
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
STUBBORN = (sys.executable, "-c", DEAF)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="exw-") as path:
        yield Path(path)


def managed(folder, name, argv, **more):
    return Managed(ProcessSpec(name, tuple(argv), {"PATH": os.environ["PATH"]}, folder / f"{name}.log"), **more)


@asynccontextmanager
async def supervised(folder, **commands):
    specs = [managed(folder, name.replace("_", "-"), argv) for name, argv in commands.items()]
    supervisor = Supervisor(specs, LocalLauncher(), QUICK)
    try:
        yield supervisor
    finally:
        await supervisor.close()


async def until(condition, supervisor):
    async with asyncio.timeout(60):
        while not condition():
            await supervisor.change(supervisor.version)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_start_is_idempotent_even_at_the_same_time(folder):
    async with supervised(folder, owner=SLEEPER) as supervisor:
        await asyncio.gather(*(supervisor.start("owner") for _ in range(5)))
        keeper = supervisor.keepers["owner"]
        assert (keeper.starts, alive(keeper.pid)) == (1, True)
        with pytest.raises(KeyError):
            await supervisor.start("nobody")


async def test_an_exit_is_told_with_its_code_and_nobody_is_restarted_but_the_coordinator(folder):
    async with supervised(folder, owner=("sh", "-c", "echo why; exit 7"), lane_0=SLEEPER) as supervisor:
        await supervisor.start_all()
        await until(lambda: supervisor.keepers["owner"].exit_code is not None, supervisor)
        os.kill(supervisor.keepers["lane-0"].pid, signal.SIGKILL)
        await until(lambda: supervisor.keepers["lane-0"].exit_code is not None, supervisor)
        owner, lane = supervisor.snapshot().processes
        assert (owner.phase, owner.exit_code, owner.pid) == (keeper_pb2.PROCESS_PHASE_EXITED, 7, 0)
        assert (lane.phase, lane.exit_code) == (keeper_pb2.PROCESS_PHASE_EXITED, -9)
        assert supervisor.keepers["owner"].log_tail() == "why"
        await asyncio.sleep(0.5)  # many times the backoff
        assert [process.starts for process in supervisor.snapshot().processes] == [1, 1]


async def test_the_coordinator_comes_back(folder):
    async with supervised(folder, coordinator=SLEEPER) as supervisor:
        await supervisor.start_all()
        for starts in (2, 3):
            os.kill(supervisor.keepers["coordinator"].pid, signal.SIGKILL)
            await until(lambda starts=starts: supervisor.keepers["coordinator"].starts == starts, supervisor)
        await supervisor.stop("coordinator", 5.0)
        await asyncio.sleep(0.5)
        assert supervisor.keepers["coordinator"].starts == 3  # stopped on request: it stays away
        assert supervisor.snapshot().processes[0].phase == keeper_pb2.PROCESS_PHASE_STOPPED


async def test_stop_terms_then_kills_and_a_stop_without_grace_counts_as_an_exit(folder):
    async with supervised(folder, lane_0=SLEEPER, lane_1=STUBBORN, lane_2=SLEEPER) as supervisor:
        await supervisor.start_all()
        async with asyncio.timeout(60):
            while supervisor.keepers["lane-1"].log_tail() != "deaf":
                await asyncio.sleep(0.02)
        pids = [keeper.pid for keeper in supervisor.keepers.values()]
        await supervisor.stop("lane-0", 10.0)
        await supervisor.stop("lane-1", 0.2)
        await supervisor.stop("lane-2", 0.0)
        await supervisor.stop("lane-2", 1.0)  # not running: nothing to do
        phases = [process.phase for process in supervisor.snapshot().processes]
        stopped, exited = keeper_pb2.PROCESS_PHASE_STOPPED, keeper_pb2.PROCESS_PHASE_EXITED
        assert phases == [stopped, stopped, exited]
        assert [alive(pid) for pid in pids] == [False] * 3
        await supervisor.start("lane-0")
        assert supervisor.keepers["lane-0"].starts == 2


async def test_after_shutdown_nothing_runs_and_nothing_starts(folder):
    family = ("sh", "-c", "sleep 600 & echo $!; wait")
    async with supervised(folder, owner=SLEEPER, lane_0=STUBBORN, lane_1=family, coordinator=SLEEPER) as supervisor:
        await supervisor.start_all()
        async with asyncio.timeout(60):
            while not supervisor.keepers["lane-1"].log_tail():
                await asyncio.sleep(0.02)
        pids = [keeper.pid for keeper in supervisor.keepers.values()]
        pids.append(int(supervisor.keepers["lane-1"].log_tail()))  # a child of the child
        await supervisor.close()
        assert [alive(pid) for pid in pids[:-1]] == [False] * 4
        async with asyncio.timeout(60):
            while alive(pids[-1]) and Path(f"/proc/{pids[-1]}/stat").read_text().split()[2] != "Z":
                await asyncio.sleep(0.02)
        await supervisor.start("owner")
        assert supervisor.keepers["owner"].handle is None


async def test_a_process_that_cannot_be_started_says_why_in_its_log(folder):
    async with supervised(folder, owner=("/no/such/program",)) as supervisor:
        await supervisor.start_all()
        await until(lambda: supervisor.keepers["owner"].exit_code is not None, supervisor)
        assert "No such file" in supervisor.keepers["owner"].log_tail()


async def test_a_log_path_that_is_a_link_is_not_followed(folder):
    (folder / "precious").write_text("kept")
    (folder / "owner.log").symlink_to(folder / "precious")
    async with supervised(folder, owner=("echo", "overwritten")) as supervisor:
        with pytest.raises(OSError, match="symbolic link"):
            await supervisor.start("owner")
    assert (folder / "precious").read_text() == "kept"


async def test_children_ignore_sigint_have_their_own_session_and_the_cores_they_were_given(folder):
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, signal, json; print(json.dumps([signal.getsignal(2) == signal.SIG_IGN, "
        "os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)), os.umask(0), sorted(os.environ)]))"
    )
    spec = ProcessSpec("lane-0", (sys.executable, "-c", code), {"PATH": "/bin", "A": "b"}, folder / "log", (core,))
    launcher = LocalLauncher()
    process = await launcher.spawn(spec)
    assert await process.wait() == 0
    assert (folder / "log").read_text().split("LC_CTYPE")[0].startswith(f'[true, true, [{core}], 63, ["A"')
    assert (folder / "log").stat().st_mode & 0o777 == 0o600
    await launcher.close()


def test_a_child_whose_parent_is_gone_already_never_becomes_the_program():
    argv = [sys.executable, "-m", "coordinator.launchers.exec", "1", "", "--", "echo", "ran"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "the parent is gone\n")
    done = subprocess.run([*argv[:3], str(os.getpid()), "", "--", "echo", "ran"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ran\n")


async def test_watch_tells_now_and_every_change_in_order(folder):
    async with supervised(folder, owner=SLEEPER, lane_0=SLEEPER) as supervisor:
        server = await serve_keepers(supervisor, folder / "s.sock")
        assert (folder / "s.sock").stat().st_mode & 0o777 == 0o600
        client = SupervisorClient(f"unix:{folder}/s.sock")
        seen = []

        async def watch():
            async for processes in client.watch():
                seen.append({p.name: (p.observed.running, p.observed.starts, p.observed.exit_code) for p in processes})

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(60):
            while not seen:
                await asyncio.sleep(0.01)
            await client.start("owner")
            await client.start("lane-0")
            await client.stop("lane-0", 0.0)
            await client.stop("owner", 5.0)
            while seen[-1] != {"owner": (False, 1, None), "lane-0": (False, 1, -9)}:
                await asyncio.sleep(0.01)
        assert seen[0] == {"owner": (False, 0, None), "lane-0": (False, 0, None)}
        starts = [snapshot["lane-0"][1] for snapshot in seen]
        assert starts == sorted(starts)
        with pytest.raises(SupervisorUnavailable, match="no process 'nobody'"):
            await client.start("nobody")
        with pytest.raises(SupervisorUnavailable, match="no process"):
            await client.stop("nobody", 1.0)
        await server.stop(0.0)
        with pytest.raises(SupervisorUnavailable):
            await watching
        await client.close()


async def test_a_launcher_that_fails_is_reported_to_who_asked(folder):
    class Broken:
        async def spawn(self, spec):
            raise OSError("out of processes")

        async def close(self):
            pass

    supervisor = Supervisor([managed(folder, "lane-0", SLEEPER)], Broken(), QUICK)
    server = await serve_keepers(supervisor, folder / "s.sock")
    async with grpc.aio.insecure_channel(f"unix:{folder}/s.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await keeper_pb2_grpc.KeepersStub(channel).Start(keeper_pb2.ProcessName(name="lane-0"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "out of processes" in refused.value.details()
    await server.stop(0.0)
    await supervisor.close()


def test_logs_are_cut_past_the_limit_and_keep_their_end(folder):
    path = folder / "lane-0.log"
    with path.open("ab") as writer:  # as a child holds it
        writer.write(b"a" * 90 + b"b" * 10)
        writer.flush()
        trim_log(path, limit_bytes=100, kept_bytes=10)
        assert path.stat().st_size == 100  # at the limit
        writer.write(b"c")
        writer.flush()
        trim_log(path, limit_bytes=100, kept_bytes=10)
        writer.write(b"after")
        writer.flush()
    assert path.read_bytes() == b"after"
    assert (folder / "lane-0.log.1").read_bytes() == b"b" * 9 + b"c"
    trim_log(folder / "missing.log")


async def test_the_upkeep_of_logs_outlives_a_disk_that_is_full(folder, monkeypatch):
    trimmed = []

    def trim(path):
        trimmed.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("coordinator.host.supervisor.trim_log", trim)
    monkeypatch.setattr("coordinator.host.supervisor.LOG_CHECK_S", 0.01)
    async with supervised(folder, one=SLEEPER, two=SLEEPER) as supervisor:
        await supervisor.start_all()
        async with asyncio.timeout(60):
            while len(trimmed) < 6:
                await asyncio.sleep(0.01)
    assert {path.name for path in trimmed} == {"one.log", "two.log"}
