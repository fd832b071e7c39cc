"""The small kernels between products, compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes import kernel_dense as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_streams(rows):
    cases.check_enter("cuda", rows, 4, 2560)
    cases.check_enter("cuda", rows, 3, 96)


def test_sampling():
    for vocabulary in (64, 2049, 248_320):
        cases.check_greatest("cuda", 3, vocabulary)
        cases.check_likeliest("cuda", 3, vocabulary)
    cases.check_uniform("cuda")


def test_rows_normed():
    for rows, width in ((1, 2560), (4, 10_240), (3, 96)):
        cases.check_normed("cuda", rows, width)


def test_an_ngram_layer():
    cases.check_ngram("cuda", 4, 2560, 4, 3)
    cases.check_ngram("cuda", 3, 96, 16, 8)
