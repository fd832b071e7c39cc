"""`python -m bench.two_lanes` from end to end at a test's size."""

import json
import subprocess
import sys

LIMIT_S = 600


def test_two_lanes_write_at_once_over_one_region(tmp_path):
    out = tmp_path / "two.json"
    command = [
        sys.executable, "-m", "bench.two_lanes", "--scale", "small", "--vram-budget", "2MiB", "--tokens", "8",
        "--read", "40", "--warm-s", "0", "--alone-s", "0.1", "--seconds", "1", "--threads", "1", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert set(result["together"]["lanes_tokens_per_s"]) == {"lane-0", "lane-1"}
    assert result["together"]["tokens"] > 8
    assert len(result["alone"]) == 2
    assert [one["tokens"] for one in result["prompts"]["beside"]] == [40, 40]
    assert result["region"]["pages_once"]
    assert 0 < result["region"]["pss_bytes_over_all_processes"] <= result["region"]["bytes"]
