"""Starts and stops, again and again: what a lane or a whole server leaves behind must be nothing.

A few cycles by default. EXPRESSWAY_LANE_CYCLES and EXPRESSWAY_SERVER_CYCLES ask for more, EXPRESSWAY_CYCLES_OUT names a
file that says after every cycle how many were done and what the owner and the host then held.
"""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fakes import processes, serving
from tests.fakes.remains import holding, remains, slope

LANE_CYCLES = int(os.environ.get("EXPRESSWAY_LANE_CYCLES", "3"))
SERVER_CYCLES = int(os.environ.get("EXPRESSWAY_SERVER_CYCLES", "2"))
OUT = os.environ.get("EXPRESSWAY_CYCLES_OUT")

# An interpreter's heap moves a little; a leak of one page a cycle shows in 100 cycles.
SETTLED_BYTES = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 60 * (LANE_CYCLES + SERVER_CYCLES))]


@pytest.fixture
def folder():
    """Short, for sockets; children put their temporary files in it."""
    path = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp"))
    (path / "tmp").mkdir()
    yield path
    shutil.rmtree(path)


def report(**figures):
    if OUT:
        Path(OUT).write_text(json.dumps(figures) + "\n")


def held_shared_bytes():
    """Of the whole host: a leaked region or segment shows here, whoever forgot it."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) << 10


def test_lanes_come_and_go_and_leave_the_owner_as_it_was(folder):
    with processes.Host(processes.tiny_pack(folder), folder) as host:
        owner = host.owner().popen.pid
        private, before = [], None
        began, answers = time.monotonic(), set()
        for cycle in range(LANE_CYCLES):
            lane = host.ready_lane("lane-0", TMPDIR=str(folder / "tmp"))
            ids, _ = host.ask("lane-0", max_tokens=4)
            answers.add(tuple(ids))
            assert lane.kill(signal.SIGTERM) == 0, lane.text()
            host.forget(lane)  # its log too
            held, left = holding(owner), remains(folder)
            private.append(held.private_bytes)
            if before is None:  # the first hand-off loads what the owner then keeps
                before = held, left
            assert (held.descriptors, held.threads) == (before[0].descriptors, before[0].threads)
            assert left == before[1]
            assert "run/lane-0.sock" not in left.files
            assert not [line for line in left.processes if "lanes" in line.split()]
            report(
                what="lane", cycles=cycle + 1, seconds=round(time.monotonic() - began, 1), descriptors=held.descriptors,
                threads=held.threads, owner_private_bytes=[private[0], private[-1]],
                owner_slope_bytes_per_cycle=round(slope(private[len(private) // 10 :]), 1),
                host_shared_bytes=held_shared_bytes(),
            )  # fmt: skip
        assert len(answers) == 1
        assert private[-1] - private[0] < SETTLED_BYTES
        if LANE_CYCLES >= 100:
            assert slope(private[LANE_CYCLES // 10 :]) < 4096 / 10


def test_servers_come_and_go_and_leave_nothing(folder):
    pack = serving.tiny_pack(folder)
    before, began = None, time.monotonic()
    for cycle in range(SERVER_CYCLES):
        with serving.Served(pack, "--vram-budget", "1MiB", TMPDIR=str(folder / "tmp")) as served:
            pids = served.pids
            assert answer(served.ready["http"])
            served.process.send_signal(signal.SIGTERM)
            assert served.wait() == 0, served.said()
            assert [name for name, pid in pids.items() if not serving.gone(pid)] == []
            left = remains(served.folder)
            assert left.processes == ()
            assert left.sockets == ()
            kept = {name for name in left.files if "/log" not in name} - {"run/expressway/.regions"}  # empty, shared
            profiles = {name for name in kept if "/profiles" in name}  # what the lane's cache held, a file per lane
            assert len(profiles) <= 2
            kept -= profiles
            assert kept == {"run", "run/expressway", "state", "state/expressway", "state/expressway/default", "stderr"}
            host, _, port = served.ready["http"].partition(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0
        now = remains(folder)
        before = before or now
        assert now == before
        assert [name for name in now.files if name.startswith("tmp/")] == []
        report(
            what="server", cycles=cycle + 1, seconds=round(time.monotonic() - began, 1),
            host_shared_bytes=held_shared_bytes(),
        )  # fmt: skip


def answer(http):
    request = urllib.request.Request(
        f"http://{http}/v1/completions",
        json.dumps({"prompt": "A train", "max_tokens": 2, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["choices"]
