"""Two clusters of one user on this host, real processes: one region for one pack, and each outlives the other."""

import os
import signal

import pytest

from bench.memory import REGION_LABEL, region_memory
from tests.fakes.serving import Served, cli, gone, tiny_pack, wait_for

IDS = ("--prompt-ids", "5,6,7,8", "--max-tokens", "8")


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def beside(served):
    return {name: served.env[name] for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")}


def region_inodes(*pids):
    """Inodes of the region's memory file in the maps of these processes."""
    found = set()
    for pid in pids:
        with open(f"/proc/{pid}/maps") as maps:
            found |= {line.split()[4] for line in maps if REGION_LABEL in line}
    return found


@pytest.mark.slow
def test_the_same_pack_is_in_memory_once_and_each_cluster_outlives_the_other(pack):
    with Served(pack, "--vram-budget", "1MiB") as first:
        answer = first.generate(*IDS)["token_ids"]
        with Served(pack, "--lanes", 2, "--vram-budget", "1MiB", name="second", **beside(first)) as second:
            assert "source=built" in first.log("owner")
            assert "source=adopted" in second.log("owner")
            lanes = [first.pids["lane-0"], second.pids["lane-0"], second.pids["lane-1"]]
            assert len(region_inodes(*lanes)) == 1
            memory = region_memory(first.pids["owner"], [second.pids["owner"], *lanes])
            assert 0 < memory.mapping_pss_bytes_sum <= memory.region_bytes
            assert second.generate(*IDS)["token_ids"] == answer

            anywhere = ("--grpc", "127.0.0.1:0", "--page", "off")
            again = cli("serve", pack, "--http", "127.0.0.1:0", *anywhere, "--cluster", "second", env=first.env)
            assert again.returncode == 1
            assert "cluster 'second' is already running here" in again.stderr
            port = cli("serve", pack, "--http", second.ready["http"], *anywhere, "--cluster", "third", env=first.env)
            assert port.returncode == 1
            assert "cluster 'second' listens there" in port.stderr.splitlines()[-1]
            listed = cli("status", "--json", env=first.env)
            assert '"clusters": [{"cluster": "default"' in listed.stdout
            one_shot = cli("generate", pack, *IDS, env=first.env)  # it adopts, too
            assert one_shot.returncode == 0, one_shot.stderr

            first.process.send_signal(signal.SIGTERM)
            assert first.wait() == 0
            assert second.generate(*IDS)["token_ids"] == answer
            old = second.kill("owner")
            wait_for(lambda: second.status()["owner"] == "ready")
            assert gone(old)
            with Served(pack, **beside(first)) as third:
                assert "source=adopted" in third.log("owner").rpartition("owner_starting")[2]
                assert third.generate(*IDS)["token_ids"] == answer
                os.kill(second.process.pid, signal.SIGKILL)
                second.wait()
                wait_for(lambda: all(gone(pid) for pid in second.seen_pids))
                assert third.generate(*IDS)["token_ids"] == answer
                with Served(pack, name="fourth", **beside(first)) as fourth:
                    assert not second.run_dir.exists()  # what the killed one left is cleared by the next start
                    assert "source=adopted" in fourth.log("owner")
                    fourth.process.send_signal(signal.SIGTERM)
                    assert fourth.wait() == 0
                third.process.send_signal(signal.SIGTERM)
                assert third.wait() == 0
        left = [path for path in first.run_dir.parent.rglob("*") if path.name != ".regions"]
        assert left == []


@pytest.mark.slow
def test_other_packs_live_side_by_side(pack, tmp_path):
    with Served(pack) as first, Served(tiny_pack(tmp_path, "f32"), name="other", **beside(first)) as other:
        assert "source=built" in other.log("owner")
        assert len(region_inodes(first.pids["lane-0"], other.pids["lane-0"])) == 2
        assert len(first.generate(*IDS)["token_ids"]) == len(other.generate(*IDS)["token_ids"]) == 8
