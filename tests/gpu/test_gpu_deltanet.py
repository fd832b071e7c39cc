"""The DeltaNet kernels compiled for the GPU that is there."""

import pytest
import torch

from lanes.kernels import delta_step
from lanes.kernels.deltanet import DeltaShape
from tests.fakes import kernel_deltanet as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "shape", [DeltaShape(1, 2, 16, 16, 4), DeltaShape(4, 8, 64, 32, 4), DeltaShape(16, 48, 128, 128, 4)]
)
def test_windows_with_rejected_rows(shape):
    windows = [(1, 1), (1, 1), (4, 2), (3, 0), (2, 2), (4, 4), (1, 1)]
    for one_launch in (0, 2, 4) if delta_step.serves(shape) else (0,):
        cases.check_windows("cuda", shape, windows, one_launch=one_launch)
