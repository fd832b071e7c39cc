"""The expert kernels compiled for the GPU that is there: every bit, at the true sizes too."""

import pytest
import torch

from tests.fakes import kernel_experts as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_arithmetic():
    for seed in range(20):
        cases.check_arithmetic("cuda", seed)


@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_every_bit(format, rows):
    ids = [sorted({0, r, r + 1, 5 + r % 2}) for r in range(rows)]
    width = min(len(row) for row in ids)
    for hostile in (False, True):
        cases.check_experts("cuda", format, 640, 320, [row[:width] for row in ids], seed=rows, hostile=hostile)


@pytest.mark.parametrize(("hidden", "inner"), [(2560, 640), (256, 64), (256, 192)])
def test_other_sizes(hidden, inner):
    """The true ones, the demo model's, and tiles that do not divide."""
    cases.check_experts("cuda", "q4g64", hidden, inner, [[0, 1, 2], [1, 2, 3]])


@pytest.mark.parametrize("skipped", [set(), {1}, {0, 1, 2}])
def test_what_is_sent_for_meanwhile_changes_no_bit(skipped):
    cases.check_experts("cuda", "q4g64", 2560, 640, [[0, 1, 2]], skipped=frozenset(skipped), ahead=True)


def test_combine_from_both_sources():
    cases.check_combine("cuda", 4, 10, 2560)
