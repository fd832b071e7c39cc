"""The kernels compile for sm_90 on a machine without a GPU, without spilling; in a process that does not interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)  # fifteen seconds of compiling, where cores are shared some minutes
def test_kernels_compile_without_spills(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel_code", "--rows", "1"], capture_output=True, text=True, timeout=800,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, dense, fused, attention, mixing = json.loads(done.stdout)["kernels"].values()
    assert {"quantise", "gate_up", "down", "combine", "route", "jobs", "post"} <= set(kernels)
    assert {"prepare", "rule", "step", "finish", "enter", "best", "uniform", "fetch", "fetch_named"} <= set(dense)
    assert {"normed", "settle", "gate", "convolve"} <= set(dense)
    assert {"prepare", "score", "select", "merge_chunks", "attend", "merge_splits"} == set(attention)
    assert {"lower", "lift", "product", "product_into", "two_products", "enter", "leave"} == set(fused)
    assert {"lower", "lift"} == set(mixing)
    for name, figures in [*kernels.items(), *dense.items(), *fused.items(), *attention.items(), *mixing.items()]:
        assert figures["spills"] == figures["stack_bytes"] == 0, (name, figures)
        assert figures["shared_bytes"] <= 99 << 10, "more than a program may have on the smallest GPUs that are served"
    for name in ("quantise", "gate_up", "down", "combine", "post"):
        assert kernels[name]["inexact"] == 0, f"{name}: an operation that is not rounded to nearest even, or may fuse"
    for name in ("gate_up", "down"):
        assert kernels[name]["loads_16_bytes"] > 0, "the alignment of records was lost"
        assert kernels[name]["integer_dots"] > 0
    assert attention["attend"]["loads_16_bytes"] >= 32, "keys and values are not read 16 bytes at a time"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_grouped_kernels_reach_the_tensor_cores_without_spills(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel_code", "--rows", "", "--chunk", "1024"], capture_output=True, text=True,
        timeout=800, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, prompt = json.loads(done.stdout)["kernels"].values()
    assert {"tiles", "quantise", "scales", "gate_up", "down", "add"} == set(kernels)
    around = {"enter", "squash", "lift", "mix", "finish", "route"}
    assert {"attend_rows", "select", "merge_chunks", "system", "solve", "across"} | around == set(prompt)
    for name, figures in prompt.items():
        assert figures["spills"] == figures["stack_bytes"] == 0, (name, figures)
    for name in ("attend_rows", "lift"):
        assert prompt[name]["tensor_core_dots"] > 0
    for name, figures in kernels.items():
        assert figures["inexact"] == 0, (name, figures)
        # Waiting sums of gate-up and down leave the registers now and then; more than that would be a tile too large.
        assert figures["stack_bytes"] <= (384 if name in ("gate_up", "down") else 0), (name, figures)
    assert kernels["gate_up"]["tensor_core_dots"] > 0
    assert kernels["down"]["tensor_core_dots"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_of_the_demo_models_lane_compiles(tmp_path):
    """Its sizes are no others': two of a head, a low rank of 16, experts of one group."""
    pack = Path(__file__).parents[3] / "deploy/demo_model/pack"
    done = subprocess.run(
        [sys.executable, "-m", "bench.pack_code", str(pack), "--rows", "2,3"], capture_output=True, text=True,
        timeout=800, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])["shared_bytes"]
    window = {"fetch", "lower", "two_products", "prepare", "rule", "finish", "product_into", "leave", "best", "score"}
    assert window | {"gate_up", "down", "add", "attend_rows", "squash"} <= set(found)
    assert max(found.values()) <= 99 << 10
