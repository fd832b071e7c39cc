"""The same cluster with Ray as the process manager: loopback only, no process and no file left, however it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes.serving import Served, gone, tiny_pack, wait_for

OUTAGE_S = float(os.environ.get("EXPRESSWAY_GCS_OUTAGE_S", "5"))


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def family(pid):
    """The process and all its descendants."""
    found = {pid}
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split("\n")
    pairs = [tuple(map(int, row.split())) for row in rows if row.strip()]
    while more := {child for child, parent in pairs if parent in found} - found:
        found |= more
    return found


def listening_beyond_loopback(pids):
    """Local addresses of listening TCP sockets of these processes that are not loopback."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link) if link.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    addresses = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]
    assert addresses, "a Ray listens somewhere"
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    return [address for address in addresses if address not in loopback]


@pytest.mark.slow
def test_ray_serves_restarts_and_leaves_nothing_after_sigterm(pack):
    with Served(pack, "--lanes", 2, "--launcher", "ray") as served:
        assert served.ready["launcher"] == "ray"
        members = family(served.process.pid)
        assert set(served.pids.values()) <= members
        assert listening_beyond_loopback(members) == []
        token = served.run_dir / "ray.token"
        assert token.stat().st_mode & 0o777 == 0o600
        answer = served.generate("--prompt-ids", "5,6,7", "--max-tokens", 4)
        served.kill("lane-0")
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"})
        assert served.generate("--prompt-ids", "5,6,7", "--max-tokens", 4)["token_ids"] == answer["token_ids"]
        lane = served.pids["lane-1"]
        keeper = int(Path(f"/proc/{lane}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)  # the lane goes with its keeper; both are replaced
        wait_for(lambda: served.pids["lane-1"] not in (0, lane))
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"})
        members |= family(served.process.pid) | {lane, keeper}
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
        assert {pid for pid in members if not gone(pid)} == set()
        assert not served.run_dir.exists()


@pytest.mark.slow
def test_a_killed_supervisor_takes_ray_and_everything_below_it_along(pack):
    with Served(pack, "--launcher", "ray") as served:
        members = family(served.process.pid)
        (directory,) = {
            target.parents[2]
            for pid in members
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if (target := Path(os.readlink(link))).name.startswith("gcs_server")
        }
        assert directory.name.startswith("exw-ray-")
        served.process.kill()
        served.wait()
        wait_for(lambda: all(gone(pid) for pid in members))
        wait_for(lambda: not directory.exists())


@pytest.mark.slow
@pytest.mark.timeout(0 if OUTAGE_S > 10 else 300)
def test_while_rays_control_store_stands_still_every_request_is_served(pack):
    """EXPRESSWAY_GCS_OUTAGE_S=60 makes it the long run whose figures are in bench/LOG.md."""
    with Served(pack, "--lanes", 2, "--launcher", "ray") as served:
        (store,) = [pid for pid in family(served.process.pid) if "gcs_server" in Path(f"/proc/{pid}/comm").read_text()]
        before = served.pids
        os.kill(store, signal.SIGSTOP)
        end, answers = time.monotonic() + OUTAGE_S, []
        while time.monotonic() < end or not answers:
            answers.append(served.generate("--prompt-ids", "5,6,7", "--max-tokens", 8)["token_ids"])
        print(f"{len(answers)} requests in {OUTAGE_S:g} s")
        os.kill(store, signal.SIGCONT)
        assert answers == [answers[0]] * len(answers)
        assert served.pids == before
        assert served.states() == {"lane-0": "ready", "lane-1": "ready"}
        served.kill("lane-0")  # and it is a process manager again
        wait_for(lambda: served.pids["lane-0"] not in (0, before["lane-0"]))
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"})
