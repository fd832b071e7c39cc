"""The decode bench on a GPU: a lane there follows the walk, and every ceiling, bound and kernel time is there."""

import json
import subprocess

import pytest
import torch

from bench import tied

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_gpu_lane_follows_the_walk_and_is_measured(tmp_path):
    out = tmp_path / "decode.json"
    command = tied.argv(
        "-m", "bench.decode", "--scale", "small", "--device", "cuda", "--vram-budget", "4GiB",
        "--tokens", "64", "--warm", "64", "--forced", "75,100", "--forced-budget", "4GiB", "--kernels",
        "--out", str(out),
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert result["adaptive"]["follows_the_walk"] == 1
    assert set(result["ceilings_gb_per_s"]) == {"cpu_read", "hbm_copy", "link", "link_beside_cpu", "cpu_beside_link"}
    assert result["gpu"]["milliseconds"]["experts"] > 0
    assert 0 < result["milliseconds"]["handshake"] < result["milliseconds"]["window"]
    for stretch in (result["adaptive"], *result["forced"]):
        assert stretch["bound_counts"] == "handshake, measured here"
        assert stretch["bound_tokens_per_s"] < stretch["bound_without_handshake"]
    assert [point["not_held"] for point in result["forced"]] == [0, 0]
