"""A matrix in host memory as kernels read it: registered where it lies, as whole pages, for as long as it lives."""

import gc

import pytest
import torch

from lanes.device import mapped as module
from lanes.device.mapped import mapped
from lanes.device.pin import PAGE_BYTES
from lanes.device.registered import Registered
from tests.unit.test_device_start import Driver


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "COPIED_BYTES", 0)


@pytest.mark.usefixtures("small")
def test_a_matrix_is_registered_where_it_lies_until_it_is_gone():
    driver, matrix = Driver(), torch.zeros(3 * PAGE_BYTES, dtype=torch.uint8)[5:-7]
    first = matrix.data_ptr()
    assert mapped(matrix, Registered(load=lambda name: driver)) is matrix
    ((address, size, flags),) = driver.registered
    assert address % PAGE_BYTES == size % PAGE_BYTES == 0
    assert address <= first < first + matrix.nbytes <= address + size
    assert size <= matrix.nbytes + 2 * PAGE_BYTES
    assert flags == 1 | 2, "portable and mapped"
    del matrix
    gc.collect()
    assert driver.registered == []


@pytest.mark.usefixtures("small")
def test_a_driver_that_refuses():
    registered = Registered(load=lambda name: Driver(codes={"cuMemHostRegister_v2": 801}))
    assert mapped(torch.zeros(9), registered) is None
    assert registered.bytes == 0


def test_a_small_matrix_is_copied(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    driver, matrix = Driver(), torch.arange(9.0)
    found = mapped(matrix, Registered(load=lambda name: driver))
    assert found is not matrix
    assert torch.equal(found, matrix)
    assert driver.registered == []
