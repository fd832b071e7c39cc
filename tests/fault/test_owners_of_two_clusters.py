"""Owners of several clusters of one user: one region per pack, whoever comes first, whoever dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.memory import region_memory
from shared_experts.attach import attach
from shared_experts.errors import RegionUnavailable
from shared_experts.handoff import ask
from shared_experts.rendezvous import CLUSTERS_MAX, Rendezvous
from tests.fakes import regions

MANIFEST = regions.manifest()
# Calls of the builder's step callback: inside the second layer, then at "data", "header", "ready" and "sealed".
KILL_POINTS = [9, *range(regions.LAYERS * 6, regions.LAYERS * 6 + 4)]


@pytest.fixture
def host(tmp_path):
    """Clusters by name with one meeting place, and a way to start owners that are all gone at the end."""
    started = []

    class Host:
        meeting = tmp_path / "regions"
        experts = regions.write_experts(tmp_path / "experts.bin")

        def run(self, cluster: str) -> Path:
            (tmp_path / cluster).mkdir(mode=0o700, exist_ok=True)
            return tmp_path / cluster

        def owner(self, cluster: str, experts: Path | None = None, **options):
            owner = regions.start_owner(self.run(cluster), experts or self.experts, regions=self.meeting, **options)
            started.append(owner)
            return owner

        def ready(self, cluster: str):
            return regions.wait_ready(self.run(cluster) / "owner.sock")

        def lane(self, cluster: str):
            """A process that maps the region, reads all of it, and lends it."""
            run = self.run(cluster)
            lane = subprocess.Popen(
                [sys.executable, "-c", LANE, str(run / "owner.sock"), str(run / "lane-0.region.sock")],
                cwd=regions.ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE,
            )  # fmt: skip
            started.append(lane)
            assert lane.stdout.readline() == b"read\n"
            return lane

        def nothing_to_build_from(self) -> Path:
            return tmp_path / "missing.bin"

    yield Host()
    for process in started:
        process.kill()
        process.communicate()


LANE = """
import sys
from tests.fakes import regions
from shared_experts.attach import attach
region = attach(sys.argv[1], regions.manifest(), 30.0)
assert bytes(region.view)[4096:] == regions.records()  # the header's page, too, is mapped by who reads it
with region.lend(sys.argv[2]):
    print("read", flush=True)
    sys.stdin.read()
"""


def end(process, how=signal.SIGKILL) -> int:
    process.send_signal(how)
    return process.wait(timeout=30)


def wait_for_state(socket: Path, state: str) -> bool:
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        try:
            if ask(socket, "status", timeout_s=2.0)[0].state == state:
                return True
        except RegionUnavailable:
            pass
        time.sleep(0.02)
    return False


def links(host) -> list[str]:
    return sorted(path.name for path in host.meeting.iterdir())


def test_the_second_cluster_adopts_and_goes_on_when_the_first_is_gone(host):
    first = host.owner("a")
    built = host.ready("a")
    lane_a = host.lane("a")
    second = host.owner("b", host.nothing_to_build_from())
    adopted = host.ready("b")
    assert (built.source, adopted.source) == ("built", "adopted")
    assert (adopted.generation, adopted.pid) == (built.generation, second.pid)

    # Memory: four processes, two of which map and have read every byte: each page is counted once.
    lane_b = host.lane("b")
    memory = region_memory(first.pid, [second.pid, lane_a.pid, lane_b.pid])
    assert memory.mapping_pss_bytes_sum == memory.region_bytes == 4096 + len(regions.records())

    assert end(lane_a, signal.SIGTERM) == -signal.SIGTERM
    (host.run("a") / "lane-0.region.sock").unlink()
    assert end(first, signal.SIGTERM) == 0
    host.owner("c", host.nothing_to_build_from())  # the second cluster still hands out, also to strangers
    assert (host.ready("c").source, host.ready("c").generation) == ("adopted", built.generation)
    with attach(host.run("b") / "owner.sock", MANIFEST, 5.0) as region:
        assert bytes(region.view[4096:]) == regions.records()


def test_the_first_cluster_is_killed_with_everything(host):
    first, second = host.owner("a"), None
    generation = host.ready("a").generation
    second = host.owner("b")
    assert host.ready("b").generation == generation
    end(first)
    again = host.owner("a", host.nothing_to_build_from())
    assert (host.ready("a").source, host.ready("a").generation) == ("adopted", generation)
    end(again)
    end(second)
    host.owner("a")
    assert host.ready("a").source == "built"
    assert host.ready("a").generation != generation


def test_a_lane_of_another_cluster_whose_owner_is_dead_lends_too(host):
    first = host.owner("a")
    generation = host.ready("a").generation
    host.lane("a")
    end(first, signal.SIGTERM)  # a lane lives on: the way to it stays
    host.owner("b", host.nothing_to_build_from())
    assert (host.ready("b").source, host.ready("b").generation) == ("adopted", generation)


def test_owners_that_start_at_once_build_once(host):
    names = ["a", "b", "c", "d"]
    for name in names:
        host.owner(name)
    found = [host.ready(name) for name in names]
    assert sorted(status.source for status in found) == ["adopted"] * 3 + ["built"]
    assert len({status.generation for status in found}) == 1


@pytest.mark.parametrize("kill_at", KILL_POINTS)
def test_the_one_that_waits_builds_when_the_builder_dies(host, kill_at):
    first = host.owner("a", kill_at=kill_at)
    while not (host.meeting.exists() and len(links(host)) == 2):  # its link: it holds the lock, or is dead already
        time.sleep(0.001)
    host.owner("b")
    assert first.wait(timeout=30) == -signal.SIGKILL
    assert host.ready("b").source == "built"
    with attach(host.run("b") / "owner.sock", MANIFEST, 5.0) as region:
        assert bytes(region.view[4096:]) == regions.records()


def test_one_that_waits_can_be_stopped(host):
    place = Rendezvous(host.meeting, MANIFEST.fingerprint, host.run("x"))
    host.meeting.mkdir(mode=0o700)
    lock = place.try_lock()
    assert place.try_lock() is None
    waiting = host.owner("a")
    assert wait_for_state(host.run("a") / "owner.sock", "adopting")
    assert end(waiting, signal.SIGTERM) == 0
    os.close(lock)


def test_other_packs_live_side_by_side(host, tmp_path):
    host.owner("a")
    host.owner("b", regions.write_experts(tmp_path / "other.bin", 1), seed=1)
    a, b = host.ready("a"), host.ready("b")
    assert (a.source, b.source) == ("built", "built")
    assert a.generation != b.generation
    assert a.fingerprint != b.fingerprint


def test_nothing_is_left_when_the_last_one_stops(host):
    first, second = host.owner("a"), None
    host.ready("a")
    second = host.owner("b")
    host.ready("b")
    assert len(links(host)) == 3  # the lock and two links
    end(first, signal.SIGTERM)
    assert len(links(host)) == 2
    end(second, signal.SIGTERM)
    assert links(host) == []


def test_a_killed_lane_does_not_keep_its_clusters_link(host):
    owner = host.owner("a")
    host.ready("a")
    end(host.lane("a"))
    assert (host.run("a") / "lane-0.region.sock").exists()
    end(owner, signal.SIGTERM)
    assert links(host) == []


def test_dead_and_unsafe_links_lead_nowhere(host, tmp_path):
    host.meeting.mkdir(mode=0o700)
    prefix = MANIFEST.fingerprint.hex()
    open_to_others = tmp_path / "open"
    open_to_others.mkdir(mode=0o755)
    (host.meeting / f"{prefix}.{'0' * 16}").symlink_to(tmp_path / "gone")
    (host.meeting / f"{prefix}.{'1' * 16}").symlink_to(open_to_others)
    (host.meeting / f"{prefix}.{'2' * 16}").symlink_to("relative")
    (host.meeting / f"{prefix}.{'3' * 16}").write_text("no link")
    place = Rendezvous(host.meeting, MANIFEST.fingerprint, host.run("x"))
    assert place.others() == []
    host.owner("a")
    assert host.ready("a").source == "built"
    assert f"{prefix}.{'0' * 16}" not in links(host)
    assert place.others() == [host.run("a")]


def test_the_number_of_links_looked_at_is_bounded(host, tmp_path):
    host.meeting.mkdir(mode=0o700)
    for number in range(CLUSTERS_MAX + 1):
        (host.meeting / f"{MANIFEST.fingerprint.hex()}.{number:016x}").symlink_to(host.run(f"c{number}"))
    assert len(Rendezvous(host.meeting, MANIFEST.fingerprint, tmp_path).others()) == CLUSTERS_MAX


def test_without_a_meeting_place_an_owner_goes_alone(host, tmp_path):
    (tmp_path / "file").touch()
    regions_in_a_file = regions.start_owner(host.run("a"), host.experts, regions=tmp_path / "file" / "regions")
    try:
        assert host.ready("a").source == "built"
        assert end(regions_in_a_file, signal.SIGTERM) == 0
    finally:
        regions_in_a_file.kill()
        regions_in_a_file.communicate()


def test_a_meeting_place_that_others_can_enter_is_refused(host):
    host.meeting.mkdir(mode=0o755)
    owner = host.owner("a")
    assert owner.wait(timeout=30) == 1
    assert b"0700" in owner.stderr.read()
