"""The start of a GPU lane where there is no GPU, and the registration of the region with a driver that is played."""

import ctypes
import threading

import pytest
import torch

from lanes.device import cuda
from lanes.device.pin import PinnedRegion
from lanes.errors import CudaUnavailable

ADDRESS, SIZE = 0x7000_0000_0000, 1 << 21
ON_DEVICE = 0x5000_0000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_the_start_says_why():
    with pytest.raises(CudaUnavailable, match="torch"):
        cuda.start()


def test_a_cuda_torch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaUnavailable, match="nvidia-smi"):
        cuda.start()


CONTEXT = 0x600D


class Driver:
    """Answers like libcuda; `codes` are those of functions that fail. The thread that made it has a context."""

    def __init__(self, *, read_only: int = 1, codes: dict[str, int] | None = None) -> None:
        self._read_only, self._codes = read_only, codes or {}
        self.registered: list[tuple[int, int, int]] = []
        self._contexts = threading.local()
        self._contexts.stack = [CONTEXT]

    def _stack(self) -> list[int]:
        return self._contexts.__dict__.setdefault("stack", [])

    def cuCtxGetCurrent(self, found):
        found._obj.value = next(reversed(self._stack()), None)
        return 0

    def cuCtxPushCurrent_v2(self, context):
        assert context.value == CONTEXT
        self._stack().append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, found):
        found._obj.value = self._stack().pop()
        return 0

    def cuDeviceGetAttribute(self, value, attribute, ordinal):
        assert (attribute, ordinal) == (113, 0)
        value._obj.value = self._read_only
        return 0

    def cuMemHostRegister_v2(self, address, size, flags):
        self.registered.append((address.value, size.value, flags.value))
        return self._codes.get("cuMemHostRegister_v2", 0)

    def cuMemHostGetDevicePointer_v2(self, found, address, flags):
        found._obj.value = ON_DEVICE
        return self._codes.get("cuMemHostGetDevicePointer_v2", 0)

    def cuMemHostUnregister(self, address):
        if not self._stack():
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        self.registered = [one for one in self.registered if one[0] != address.value]
        return 0


def pinned(driver: Driver) -> PinnedRegion:
    return PinnedRegion(ADDRESS, SIZE, load=lambda name: driver)


def test_a_region_is_registered_read_only_and_given_back():
    driver = Driver()
    with pinned(driver) as region:
        assert driver.registered == [(ADDRESS, SIZE, 1 | 2 | 8)]
        assert region.mode == "mapped"
        assert region.device_address(ADDRESS) == ON_DEVICE
        assert region.device_address(ADDRESS + SIZE - 1) == ON_DEVICE + SIZE - 1
        with pytest.raises(AssertionError):
            region.device_address(ADDRESS + SIZE)
    assert driver.registered == []
    region.close()


def test_a_gpu_that_registers_nothing_read_only_has_the_region_copied():
    driver = Driver(read_only=0)
    with pinned(driver) as region:
        assert region.mode == "copied"
        assert region.device_address(ADDRESS) is None
        assert driver.registered == []


@pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
def test_a_driver_that_refuses(name):
    driver = Driver(codes={name: 801})
    with pytest.raises(CudaUnavailable, match=f"{name} failed with code 801"):
        pinned(driver)
    if name != "cuMemHostRegister_v2":
        assert driver.registered == []


def test_no_driver():
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    with pytest.raises(CudaUnavailable, match="no CUDA driver"):
        PinnedRegion(ADDRESS, SIZE, load=missing)


def test_parts_of_pages_are_not_registered():
    with pytest.raises(AssertionError):
        PinnedRegion(ADDRESS + 1, SIZE, load=lambda name: Driver())
