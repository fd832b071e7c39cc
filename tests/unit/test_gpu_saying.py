"""What a decode window of a GPU lane is told, against tensors."""

import numpy as np
import pytest
import torch

from lanes.models.qwen4_exp.gpu.saying import HostRows
from lanes.state.commit import shift, shift_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_rows_of_a_matrix_are_the_bits_of_its_type(dtype, rows):
    wide = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-24, 24)
    wide[3, :4] = torch.tensor([0.0, -0.0, 3.3895e38, 1e-45])
    matrix = wide.to(dtype)[2:]  # not at the storage's beginning
    ids = np.array([1, 17, 1, 0])[:rows]
    out = np.full((4, 48), np.nan, np.float32)
    HostRows(matrix).into(ids, out[:rows])
    want = matrix[torch.from_numpy(ids)].float().numpy()
    assert out[:rows].tobytes() == want.tobytes()
    assert np.isnan(out[rows:]).all()


@pytest.mark.parametrize(("kept", "new"), [(0, 1), (2, 1), (2, 2), (2, 4), (3, 1)])
def test_ids_move_on_as_tensors_do(kept, new):
    tail, ids = torch.arange(kept), torch.arange(100, 100 + new)
    want = tail.clone()
    shift(want, ids)
    shift_ids(tail.numpy(), ids.numpy())
    assert torch.equal(tail, want)
