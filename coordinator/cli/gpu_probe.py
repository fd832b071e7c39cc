"""`python -m coordinator.cli.gpu_probe`: what the CUDA driver says about this host's GPUs, as one JSON object.

A process of its own: a broken driver may hang or crash whoever loads it. It asks the driver library alone (no toolkit,
no torch), creates no context and changes nothing. Not here: what it means (doctor_gpu).
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

LIBRARY = "libcuda.so.1"
NAME_BYTES = 256
ATTRIBUTES = {
    "host_register": 99,
    "read_only_host_register": 113,
    "pageable_memory": 88,
    "compute_major": 75,
    "compute_minor": 76,
}


def probe() -> dict[str, Any]:
    """{"driver": 12080, "devices": [{"name", …}]}, or {"absent": why} without driver or GPU, or {"error": why}."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError:
        return {"absent": "no CUDA driver"}
    code = cuda.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return {"absent": "a CUDA driver, but no GPU"}
    if code:
        return {"error": f"cuInit failed with code {code}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return {"error": "the driver does not say what it is"}
    return {"driver": version.value, "devices": [_device(cuda, number) for number in range(count.value)]}


def _device(cuda: ctypes.CDLL, number: int) -> dict[str, Any]:
    device, value, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(NAME_BYTES)
    if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetName(name, NAME_BYTES, device):
        return {"name": f"GPU {number}", "error": "the driver does not describe it"}
    found: dict[str, Any] = {"name": name.value.decode(errors="replace")}
    if not cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        found["memory_bytes"] = size.value
    for attribute, code in ATTRIBUTES.items():
        if not cuda.cuDeviceGetAttribute(ctypes.byref(value), code, device):
            found[attribute] = value.value
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
