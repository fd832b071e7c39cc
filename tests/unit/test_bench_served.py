"""`python -m bench.served`: what it reads of a cluster that runs, and that a part which fails takes no other along."""

import json
import os

import pytest

from bench import served


@pytest.fixture
def cluster(tmp_path):
    found = {
        "pids": {"supervisor": 1, "owner": os.getpid(), "lane-10": os.getpid(), "lane-2": os.getpid()},
        "ready_s": 3.5, "cores": {"lane-2": "0-3", "doors": "any"}, "run_dir": str(tmp_path), "model": "made-up",
        "grpc": "127.0.0.1:1",
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(found))
    return found


def test_memory_of_owner_lanes_and_holder(cluster):
    assert list(served.lanes_of(cluster)) == ["lane-2", "lane-10"]
    without, beside = served.memory(cluster, None), served.memory(cluster, os.getpid())
    assert set(without["processes"]) == {"owner", "lane-2", "lane-10"}
    assert set(beside["processes"]) == {"owner", "lane-2", "lane-10", "holder"}
    assert beside["total_pss_bytes"] > 1.2 * without["total_pss_bytes"]
    assert 0 < without["last_lane_added_bytes"] < 2 * without["processes"]["lane-10"]["pss_bytes"]
    assert without["region_pages_once"]


def test_starting_is_told_from_the_first_line_of_all_logs(cluster, tmp_path):
    lines = {
        "owner": ['{"timestamp": "2026-11-30T10:00:00.5Z", "event": "filled", "seconds": 0.4}', "no JSON", "[1]"],
        "lane-2": ['{"timestamp": "2026-11-30T10:00:02Z", "event": "lane_ready"}', '{"event": "untimed"}'],
    }
    for name, text in lines.items():
        (tmp_path / f"{name}.log").write_text("\n".join(text))
    found = served.startup(cluster, tmp_path)
    assert found["logs"] == {"owner": [[0.0, "filled", 0.4]], "lane-2": [[1.5, "lane_ready", None]]}
    assert (found["ready_s"], found["cores"]) == (3.5, cluster["cores"])
    assert served.startup(cluster, None)["logs"] == {}


def test_a_part_that_fails_is_told_and_the_others_are_written(cluster, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert served.main([str(tmp_path), "--walk", "small", "--read", "8", "--out", str(out)]) == 1
    said = json.loads(out.read_text())
    assert said == json.loads(capsys.readouterr().out)
    assert set(said["failed"]) == {"prompts"}
    assert said["memory"]["processes"]
    assert said["pack"] == {"name": "made-up"}
    assert served.main([str(tmp_path), "--holder", "4194304999"]) == 1  # nobody
    assert set(json.loads(capsys.readouterr().out)["failed"]) == {"memory"}


def test_prompts_need_a_walk(cluster, tmp_path):
    with pytest.raises(SystemExit):
        served.main([str(tmp_path), "--read", "8"])
