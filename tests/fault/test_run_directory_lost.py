"""A run directory that takes no more files, or that somebody deleted: the cluster serves on and stops cleanly."""

import os
import shutil
import signal

import pytest

from tests.fakes.serving import Served, gone, tiny_pack, wait_for


@pytest.mark.slow
def test_a_cluster_outlives_what_it_cannot_write_and_its_run_directory(tmp_path):
    with Served(tiny_pack(tmp_path), "--lanes", 1, "--vram-budget", "1MiB") as served:
        lane, pids = served.pids["lane-0"], set(served.pids.values())
        (served.run_dir / "cluster.json").unlink()
        (served.run_dir / "cluster.json").mkdir()  # as a full disk would: nothing can be renamed to it
        os.kill(lane, signal.SIGKILL)
        wait_for(lambda: "cluster.json is out of date" in served.said())
        assert served.generate("--prompt-ids", "5,6", "--max-tokens", "2")["finish_reason"] == "length"
        shutil.rmtree(served.run_dir)
        assert served.generate("--prompt-ids", "5,6", "--max-tokens", "2")["finish_reason"] == "length"
        served.process.send_signal(signal.SIGTERM)
        assert served.wait() == 0, served.said()
        assert "Traceback" not in served.said()
        assert all(gone(pid) for pid in pids)
