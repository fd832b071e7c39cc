"""The grouped expert kernel compiled for the GPU that is there: every bit, at the true sizes too."""

import pytest
import torch

from shared_experts.layout import EXPERT_FORMATS, RecordLayout
from tests.fakes import kernel_grouped as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("format", ["q4g64", "q4g32", "q8"])
@pytest.mark.parametrize("hostile", [False, True])
def test_every_bit(format, hostile):
    cases.check_grouped("cuda", format, 640, 320, 90, 3, 5, cuts=(1, 4), hostile=hostile)


def test_the_true_sizes():
    cases.check_grouped("cuda", "q4g64", 2560, 640, 20, 3, 6, cuts=(2,))


def test_where_chunks_and_batches_end_changes_no_bit():
    cases.check_chunks("cuda", RecordLayout.of(EXPERT_FORMATS["q4g64"], 1280, 640), 300, 4, 9)
