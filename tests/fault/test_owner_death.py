"""Owners that die, lanes that write: real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from shared_experts.attach import attach
from shared_experts.errors import RegionError, RegionUnavailable
from tests.fakes import regions

MANIFEST = regions.manifest()
# 4 layers of 24 KiB in 4 KiB chunks, then "data", "header", "ready", "sealed": calls 0..27 of the step callback.
STEPS = regions.LAYERS * 6 + 4
KILL_POINTS = [*range(0, 16, 1), *range(STEPS - 4, STEPS)]


@pytest.fixture
def host(tmp_path):
    """Run directory, experts file, and a way to start owners that are all gone at the end."""
    started = []

    class Host:
        run = tmp_path / "run"
        socket = run / "owner.sock"
        experts = regions.write_experts(tmp_path / "experts.bin")

        def owner(self, **options):
            started.append(regions.start_owner(self.run, self.experts, **options))
            return started[-1]

        def kill(self, process):
            process.kill()
            process.wait()

    Host.run.mkdir(mode=0o700)
    yield Host()
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_there_are_twenty_points():
    assert len(set(KILL_POINTS)) == 20


@pytest.mark.parametrize("kill_at", KILL_POINTS)
def test_an_owner_killed_while_it_builds_never_shows_a_wrong_byte(host, kill_at):
    seen, dead = set(), threading.Event()

    def lane():
        last = False
        while not last:
            last = dead.is_set()  # one more try after the death
            try:
                with attach(host.socket, MANIFEST, 0.06) as region:
                    seen.add("right" if bytes(region.view[4096:]) == regions.records() else "wrong")
            except RegionError as error:
                seen.add(type(error))

    thread = threading.Thread(target=lane)
    thread.start()
    assert host.owner(kill_at=kill_at).wait(timeout=30) == -signal.SIGKILL
    dead.set()
    thread.join()
    assert seen == {RegionUnavailable}


@pytest.mark.parametrize("kill_at", [5, STEPS - 1])
def test_the_next_owner_builds_after_a_death_while_building(host, kill_at):
    host.owner(kill_at=kill_at).wait(timeout=30)
    assert host.socket.exists()  # the dead owner's name, in nobody's way
    host.owner()
    with attach(host.socket, MANIFEST, 30.0) as region:
        assert bytes(region.view[4096:]) == regions.records()


HOLDER = """
import sys
from tests.fakes import regions
from shared_experts.attach import attach
region = attach(sys.argv[1], regions.manifest(), 30.0)
with region.lend(sys.argv[2]):
    print(region.generation.hex(), flush=True)
    sys.stdin.read()
"""


def start_holder(host, name: str) -> tuple[subprocess.Popen, bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(host.socket), str(host.run / name)],
        cwd=regions.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    return process, bytes.fromhex(process.stdout.readline().decode())


def end_holder(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def test_the_successor_adopts_from_a_living_lane_and_builds_anew_without_one(host):
    first = host.owner()
    holder, generation = start_holder(host, "lane-1.region.sock")
    host.kill(first)
    host.experts.write_bytes(b"")  # nothing to build from: whatever is served now was adopted

    second = host.owner()
    status = regions.wait_ready(host.socket)
    assert (status.source, status.generation, status.pid) == ("adopted", generation, second.pid)
    with attach(host.socket, MANIFEST, 5.0) as region:
        assert region.generation == generation
        assert region.header.owner_pid == first.pid
        assert bytes(region.view[4096:]) == regions.records()
    host.kill(second)

    end_holder(holder)
    assert (host.run / "lane-1.region.sock").exists()  # a dead lane's name
    regions.write_experts(host.experts)
    host.owner()
    status = regions.wait_ready(host.socket)
    assert status.source == "built"
    assert status.generation != generation


def test_hostile_and_foreign_holders_are_passed_over(host, tmp_path):
    first = host.owner()
    holder, generation = start_holder(host, "lane-9.region.sock")
    host.kill(first)
    (host.run / "lane-0.region.sock").write_text("no socket")

    # Another pack's region, and one whose header is right and whose bytes are not.
    header = os.pread(regions.build(tmp_path).fd, 4096, 0)
    wrong = regions.forged(header + bytes(len(regions.records())))
    other = regions.build(tmp_path, seed=1)
    from shared_experts.attach import AttachedRegion
    from shared_experts.region import RegionHeader

    liars = [AttachedRegion(wrong, RegionHeader.decode(header)), AttachedRegion(other.fd, other.header)]
    servers = [liar.lend(host.run / f"lane-{i}.region.sock") for i, liar in enumerate(liars, 1)]
    for server in servers:
        server.start()
    host.owner()
    status = regions.wait_ready(host.socket)
    assert (status.source, status.generation) == ("adopted", generation)
    for server, liar in zip(servers, liars, strict=True):
        server.close()
        liar.close()
    end_holder(holder)


def test_a_second_owner_is_refused_while_the_first_lives_and_welcome_after(host):
    first = host.owner()
    generation = regions.wait_ready(host.socket).generation
    second = host.owner()
    assert second.wait(timeout=30) == 1
    assert b"RegionBusy" in second.stderr.read()
    assert regions.wait_ready(host.socket).generation == generation
    host.kill(first)
    host.owner()
    assert regions.wait_ready(host.socket).generation != generation


def test_sigterm_ends_cleanly_at_any_time(host):
    owner = host.owner()
    regions.wait_ready(host.socket)
    owner.terminate()
    assert owner.wait(timeout=30) == 0
    assert [p.name for p in host.run.iterdir()] == ["owner.lock"]
    with pytest.raises(RegionUnavailable):
        attach(host.socket, MANIFEST, 0.05)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_run_directory_that_others_can_enter_is_refused(host, mode):
    host.run.chmod(mode)
    owner = host.owner()
    assert owner.wait(timeout=30) == 1
    assert b"0700" in owner.stderr.read()


def test_a_linked_run_directory_is_refused(host, tmp_path):
    (tmp_path / "link").symlink_to(host.run)
    owner = regions.start_owner(tmp_path / "link", host.experts)
    assert b"0700" in owner.communicate(timeout=30)[1]
    assert owner.returncode == 1


STORE = """
import ctypes, sys
from tests.fakes import regions
from shared_experts.attach import attach
region = attach(sys.argv[1], regions.manifest(), 30.0)
address = region.record_address(1, 1) if sys.argv[2] == "record" else region.base_address
print(ctypes.string_at(address, 4).hex(), flush=True)
if sys.argv[3] == "protect":
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3) == -1 and ctypes.get_errno() == 13
ctypes.memset(address, 0, 4)
print("written", flush=True)
"""


@pytest.mark.parametrize("how", ["plain", "protect"])
@pytest.mark.parametrize("where", ["header", "record"])
def test_a_stray_write_faults_in_the_writer_and_nobody_else(host, where, how):
    host.owner()
    with attach(host.socket, MANIFEST, 30.0) as region:
        before = bytes(region.view)
        writer = subprocess.run(
            [sys.executable, "-c", STORE, str(host.socket), where, how], cwd=regions.ROOT, capture_output=True
        )
        assert writer.returncode == -signal.SIGSEGV, writer.stderr.decode()
        assert b"written" not in writer.stdout
        assert bytes(region.view) == before
    assert regions.wait_ready(host.socket).state == "ready"
