"""The CUDA device of a lane, started once: what it is, and how the lane's torch computes on it.

Not here: memory arithmetic (budget), the shared region (pin). A lane has one GPU: the first that its process may see.

Invariant: a `CudaDevice` that exists has a live context in this process, and torch multiplies fp32 matrices in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lanes.errors import CudaUnavailable

LEAST_CAPABILITY = (8, 0)  # bf16 products; the kernels' integer dots need 6.1


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """What started."""

    device: torch.device
    name: str
    capability: tuple[int, int]
    total_bytes: int
    used_bytes: int  # on the whole device, of any process, once the context stood


def start() -> CudaDevice:
    """Starts the device; raises CudaUnavailable, which says what to look at."""
    if torch.version.cuda is None:
        raise CudaUnavailable(
            f"--device cuda: this torch ({torch.__version__}) is built for the CPU; install its CUDA build"
        )
    if not torch.cuda.is_available():
        raise CudaUnavailable(
            "--device cuda: torch finds no GPU; look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and `expressway doctor`"
        )
    device = torch.device("cuda", 0)
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the context
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise CudaUnavailable(f"--device cuda: the GPU cannot be used: {_first_line(error)}") from error
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        raise CudaUnavailable(f"--device cuda: {name} has compute capability {found}; {least} is needed")
    _exact_products()
    return CudaDevice(device, name, capability, total_bytes, total_bytes - free_bytes)


def limit(device: CudaDevice, most_allocated_bytes: int) -> None:
    """From now on torch's allocator refuses to take more than this; raises CudaUnavailable where the GPU has less."""
    if most_allocated_bytes > device.total_bytes:
        raise CudaUnavailable(
            f"--vram-budget: {most_allocated_bytes >> 20} MiB are planned; {device.name} has "
            f"{device.total_bytes >> 20} MiB in all"
        )
    torch.cuda.set_per_process_memory_fraction(most_allocated_bytes / device.total_bytes, device.device)


def _exact_products() -> None:
    """fp32 products are fp32 (they steer routing and tokens), and bf16 ones add up in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
