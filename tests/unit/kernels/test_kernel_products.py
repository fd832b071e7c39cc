"""Products of a few rows with what is fused to them, in the interpreter."""

import pytest
import torch
import triton

from lanes.kernels import products
from tests.fakes import kernel_products as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")

KINDS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 320), (2, 20), (3, 192), (4, 2049)])
def test_products(kind, rows, columns):
    cases.check_products("cpu", kind, rows, columns, (137, 9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hyper_connection(kind):
    cases.check_lower_and_lift("cpu", kind, 1, 4, 96, 20)
    cases.check_lower_and_lift("cpu", kind, 3, 3, 64, 16)
    cases.check_lower_and_lift("cpu", kind, 2, 2, 64, 8, injects=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hyper_connection_of_few_rows(kind):
    cases.check_hyper_connection("cpu", kind, 1, 4, 96, 20)
    cases.check_hyper_connection("cpu", kind, 3, 3, 64, 16)
    cases.check_hyper_connection("cpu", kind, 2, 2, 1030, 8, injects=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_into_the_streams(kind):
    cases.check_product_into("cpu", kind, 1, 320, 70, 4)
    cases.check_product_into("cpu", kind, 2, 1100, 33, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_shared_expert(kind, rows):
    cases.check_shared("cpu", kind, rows, 96, 32, 24, 4)


def test_sizes_of_programs(monkeypatch):
    """At the true sizes: a step is all threads' 16 bytes, sums stay in registers, the chip is full."""
    monkeypatch.setattr(products, "INTERPRETED", False)
    for count, columns in ((16_384, 2560), (2560, 6144), (324, 10_240), (10_240, 320), (1280, 2560), (2560, 640)):
        matrix = torch.empty((1, 1), dtype=torch.bfloat16).expand(count, columns)
        for rows in range(1, products.MOST_ROWS + 1):
            t = products.tile(matrix, rows)
            assert t.step == t.warps * 32 * 8
            assert t.rows * t.padded * 8 <= 128
            assert count / t.rows >= 132


def test_steps_that_divide_columns(monkeypatch):
    """Every load counts, and threads that are not along a step take other rows."""
    monkeypatch.setattr(products, "INTERPRETED", False)
    for count, columns, step in ((2560, 6144, 1024), (1280, 2560, 512), (2560, 640, 128)):
        matrix = torch.empty((1, 1), dtype=torch.bfloat16).expand(count, columns)
        for rows in (1, 2):
            t = products.deep(matrix, rows)
            assert (t.step, t.side * t.step) == (step, t.warps * 32 * 8)
            assert t.rows >= t.side
    odd = products.deep(torch.empty((1, 1), dtype=torch.bfloat16).expand(64, 2049), 1)
    assert (odd.side, odd.step) == (1, 1024)
