"""`expressway lane` on a real cluster: out of service and back, restarted, one more and one less."""

from __future__ import annotations

import json

import pytest

from tests.fakes.serving import Served, cli, tiny_pack, wait_for


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("operations"))


@pytest.mark.slow
def test_lanes_are_operated_by_the_command_line(pack):
    with Served(pack, "--vram-budget", "1MiB") as served:

        def lane(*words):
            done = cli("lane", *words, "--json", env=served.env)
            assert done.returncode == 0, done.stderr + served.log("coordinator")
            return json.loads(done.stdout)

        assert lane("add") == {"lane": "lane-1"}
        wait_for(lambda: served.states() == {"lane-0": "ready", "lane-1": "ready"}, 120)
        assert lane("drain", "lane-0") == {"lane": "lane-0", "state": "draining", "doing": "done", "running": 0}
        assert served.states() == {"lane-0": "draining", "lane-1": "ready"}
        assert served.generate("--prompt-ids", "5,6,7", "--max-tokens", 4)["lane"]["name"] == "lane-1"
        before = served.kill("coordinator")
        wait_for(lambda: served.states() == {"lane-0": "draining", "lane-1": "ready"}, 120)
        assert served.pids["coordinator"] != before
        lane("undrain", "lane-0")
        pids = served.pids
        assert lane("restart")["lane"] == "lane-1"
        assert served.states() == {"lane-0": "ready", "lane-1": "ready"}
        wait_for(lambda: all(served.pids[name] not in (0, pids[name]) for name in ("lane-0", "lane-1")))
        lane("remove", "lane-0")
        assert served.states() == {"lane-1": "ready"}
        failed = cli("lane", "drain", "lane-0", "--json", env=served.env)
        assert failed.returncode == 1
        assert json.loads(failed.stdout)["error"]["code"] == "lane_not_found"
