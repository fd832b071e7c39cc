"""Products with something fused to them, compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes import kernel_products as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KINDS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [20, 2049, 10_240])  # other sizes stand below, in what is fused
def test_products(kind, rows, columns):
    cases.check_products("cuda", kind, rows, columns, (1000, 96))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_hyper_connection(kind, rows):
    cases.check_lower_and_lift("cuda", kind, rows, 4, 2560, 320)
    cases.check_lower_and_lift("cuda", kind, rows, 3, 64, 16, injects=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows(kind, rows):
    cases.check_hyper_connection("cuda", kind, rows, 4, 2560, 320)
    cases.check_hyper_connection("cuda", kind, rows, 3, 64, 16, injects=False)
    cases.check_product_into("cuda", kind, rows, 6144, 2560, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_shared_expert(kind, rows):
    cases.check_shared("cuda", kind, rows, 2560, 640, 512, 10)
