"""The fetch kernel compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes.kernel_fetch import check_fetch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 257, 25_088])
def test_fetch(dtype, count):
    check_fetch("cuda", dtype, count)
