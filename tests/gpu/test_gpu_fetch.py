"""The fetch kernels compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes.kernel_fetch import check_fetch, check_fetch_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 257, 25_088])
def test_fetch(dtype, count):
    check_fetch("cuda", dtype, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_row_that_a_place_names(dtype, narrow):
    check_fetch_named("cuda", dtype, 2560, narrow=narrow)
