"""What a decode window of a GPU lane is told, against tensors."""

import numpy as np
import pytest
import torch

from lanes.models.qwen4_exp.gpu.angles import Places
from lanes.models.qwen4_exp.gpu.saying import HostRows
from lanes.models.qwen4_exp.rows import Rotary
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


@pytest.mark.parametrize(("block", "after"), [(64, 0), (16, 1), (1, 0), (7, 3)])
def test_places_have_the_rotations_bits(block, after):
    rotary, most = Rotary(16, 1e7, torch.device("cpu")), 4
    places, random = Places(rotary, block, most, after=after), np.random.default_rng(2)
    starts = [0, 255, 256, 257, 1000, 3, 262_140, *range(500, 900, 37), *random.integers(0, 262_140, 40).tolist()]
    for start in starts:
        rows = int(random.integers(1, most + 1))
        out = np.full((4, most, 8), np.nan, np.float32)
        places.into(out, start, rows)
        own = torch.arange(start, start + rows)
        want = torch.stack((*rotary.at(own + after), *rotary.at(own - own % block + after))).numpy()
        assert out[:, :rows].tobytes() == want.tobytes()
        assert np.isnan(out[:, rows:]).all()
