"""`expressway serve` over a synthetic model that another process holds, measured along its walk over the gRPC door."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes.serving import Served, cli, wait_for

SMALL = ("--scale", "small", "--layers", "2", "--experts", "16", "--threads", "1", "--measure", "0")


@pytest.fixture
def held():
    """(pack, environment) of a model that is held in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="exw-", dir="/tmp"))  # short: sockets lie in it
    (folder / "run").mkdir(mode=0o700)
    xdg = {"XDG_RUNTIME_DIR": f"{folder}/run", "XDG_STATE_HOME": f"{folder}/state"}
    argv = [sys.executable, "-m", "bench.synthetic", *SMALL, "--keep", f"{folder}/pack", "--hold", f"{folder}/hold"]
    with (folder / "said").open("w") as said:
        holder = subprocess.Popen(argv, env={**os.environ, **xdg}, stdout=subprocess.DEVNULL, stderr=said)
    try:
        wait_for(lambda: "held: " in (folder / "said").read_text() or holder.poll() is not None)
        assert holder.poll() is None, (folder / "said").read_text()
        yield folder / "pack", xdg
        holder.send_signal(signal.SIGTERM)
        assert holder.wait(60) == 0
        assert list((folder / "run" / "expressway" / ".regions").iterdir()) == []  # both have left
    finally:
        holder.kill()
        holder.wait()
        shutil.rmtree(folder)


def test_a_cluster_takes_the_held_experts_and_answers_along_the_walk(held, tmp_path):
    pack, xdg = held
    with Served(pack, "--vram-budget", "1MiB", "--context", "512", "--drafts", "0", "--park", "0", **xdg) as served:
        assert "source=adopted" in served.log("owner")
        words = ("--workload", "question", "--scale", "0.2", "--concurrency", "1", "--seconds", "2", "--window", "1")
        done = cli("bench", "run", "--walk", "small", *words, "--out", tmp_path / "report.json", env=served.env)
        assert done.returncode == 0, done.stderr
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0
    report = json.loads((tmp_path / "report.json").read_text())
    run = report["runs"]["1 agents"]["figures"]
    assert run["errors"] == {}, report["server"]
    assert run["requests"] > 0
    assert 0 < run["experts"]["hit_rate"] < 1
    assert report["server"]["model"] == "synthetic-small, changed"
    assert report["pack"]["region_bytes"] > 0
    assert (report["pack"]["format"], len(report["pack"]["fingerprint"])) == ("q4g64", 64)
