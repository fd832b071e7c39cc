"""The small kernels between products, compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes import kernel_dense as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_hyper_connection(rows):
    cases.check_stream("cuda", rows, 4, 2560, 320)
    cases.check_stream("cuda", rows, 4, 96, 20, injects=False)


@pytest.mark.parametrize(("size", "rotated"), [(256, 64), (128, 64), (24, 12)])
def test_heads(size, rotated):
    cases.check_norm_rotate("cuda", 4, 16, size, rotated)


def test_sampling():
    for vocabulary in (64, 2049, 248_320):
        cases.check_argmax("cuda", 3, vocabulary)
    cases.check_uniform("cuda")
