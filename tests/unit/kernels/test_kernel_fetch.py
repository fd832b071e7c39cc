"""The fetch kernels in the interpreter."""

import pytest
import torch
import triton

from lanes.kernels.fetch import fetch
from tests.fakes.kernel_fetch import check_fetch, check_fetch_named

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 2049])
def test_fetch(dtype, count):
    check_fetch("cpu", dtype, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("width", [64, 1024, 1100])
def test_the_row_that_a_place_names(dtype, narrow, width):
    check_fetch_named("cpu", dtype, width, narrow=narrow)


def test_what_does_not_fit_is_refused():
    with pytest.raises(AssertionError):
        fetch(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(AssertionError):
        fetch(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
