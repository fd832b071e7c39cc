"""The kernels compile for sm_90 on a machine without a GPU, without spilling; in a process that does not interpret."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_compile_without_spills():
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel_code", "--rows", "1"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (kernels,) = json.loads(done.stdout)["kernels"].values()
    assert {"quantise", "gate_up", "down", "combine", "route"} <= set(kernels)
    for name, figures in kernels.items():
        assert figures["spills"] == figures["stack_bytes"] == 0, (name, figures)
    for name in ("gate_up", "down"):
        assert kernels[name]["loads_16_bytes"] > 0, "the alignment of records was lost"
        assert kernels[name]["integer_dots"] > 0
    assert kernels["gate_up"]["barriers"] <= 2, "codes go through shared memory"
