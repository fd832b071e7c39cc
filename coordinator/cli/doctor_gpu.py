"""Doctor's look at the GPUs: are there any, and may they read a sealed region in place.

A region is sealed and mapped read-only, so a GPU reaches it in place only where the driver can register read-only host
memory. Not here: asking the driver (gpu_probe, in a process of its own). Invariant: a host without a GPU is well.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from typing import Any

from coordinator.cli.doctor_checks import Check
from coordinator.launchers.base import module_argv

NAME = "GPU"
PROBE_TIMEOUT_S = 30.0


def gpu(env: Mapping[str, str]) -> Check:
    """Runs the probe and judges what it says."""
    argv = module_argv("coordinator.cli.gpu_probe")
    try:
        done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        found = json.loads(done.stdout)
        return judge(found, importlib.metadata.version("torch"))
    except subprocess.TimeoutExpired:
        return Check(NAME, "fail", "the CUDA driver does not answer", "look at `nvidia-smi`; restart the host")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Check(NAME, "fail", "the CUDA driver broke off", "look at `nvidia-smi`; install the driver again")


def judge(found: dict[str, Any], torch_version: str = "") -> Check:
    """What the probe's answer means, with that build of torch."""
    if "absent" in found:
        return Check(NAME, "ok", f"{found['absent']}; lanes run on the CPU")
    if "error" in found:
        return Check(NAME, "fail", str(found["error"]), "look at `nvidia-smi`; does the driver fit the kernel module?")
    devices, driver = found["devices"], int(found["driver"])
    if not devices:
        return Check(NAME, "ok", "a CUDA driver, but no GPU; lanes run on the CPU")
    names = ", ".join(
        f"{d['name']} ({d['memory_bytes'] / (1 << 30):.0f} GiB)" if "memory_bytes" in d else d["name"] for d in devices
    )
    text = f"{names}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}"
    refusing = [d["name"] for d in devices if not d.get("read_only_host_register")]
    if refusing:
        return Check(
            NAME,
            "warn",
            f"{text}; read-only host memory cannot be registered on {', '.join(refusing)}",
            "--device cuda needs that, because lanes read the sealed region in place: a newer driver may help",
        )
    text += "; read-only host memory can be registered"
    if torch_version.endswith("+cpu"):
        return Check(
            NAME,
            "warn",
            f"{text}; torch is its CPU build ({torch_version})",
            "--device cuda needs torch's CUDA build (docs/gpu-lane.md); lanes on the CPU are fine",
        )
    return Check(NAME, "ok", text)
