"""Plans of what comes to the cache while experts are waited for: pieces of the matrix, evenly spread."""

import pytest
import torch

from lanes.kernels.products import tile
from lanes.models.qwen4_exp.gpu.ahead import pieces, plan


def test_pieces_are_whole_programs_evenly_spread():
    matrix = torch.zeros((128, 64), dtype=torch.bfloat16)
    each = tile(matrix, 1).rows * 128
    there = matrix.nbytes // each
    for most in (each, 2 * each + 5, matrix.nbytes // 2, matrix.nbytes, 10 * matrix.nbytes):
        found = pieces(matrix, most)
        at, size = found.T
        assert len(found) == min(there, most // each)
        assert (size == each).all()
        assert ((at - matrix.data_ptr()) % each == 0).all()
        assert at[0] == matrix.data_ptr()
        assert at[-1] + each <= matrix.data_ptr() + matrix.nbytes
        gaps = at.diff()
        assert (gaps > 0).all()
        assert not len(gaps) or gaps.max() - gaps.min() <= each


@pytest.mark.parametrize("matrix", [torch.zeros((2, 3)), torch.zeros((65, 64))[1:, 1:], torch.zeros((64, 128))[:, ::2]])
def test_what_cannot_be_sent_for_is_left(matrix):
    assert pieces(matrix, 1 << 20) is None
    assert pieces(torch.zeros((64, 64)), 3) is None


def test_without_a_gpu_there_is_no_such_cache():
    assert plan(torch.zeros((64, 64))) is None
