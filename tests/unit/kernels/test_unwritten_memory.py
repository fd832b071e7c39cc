"""What tests of kernels stand on: new memory has nothing in it that a kernel could read unnoticed."""

import torch


def test_nothing_is_zero_by_chance():
    made = [torch.empty(3), torch.empty((2, 2), dtype=torch.bfloat16), torch.empty_like(torch.ones(2))]
    made += [torch.ones(1).new_empty(5), torch.empty_strided((2, 2), (2, 1))]
    assert all(tensor.isnan().all() for tensor in made)
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert not torch.zeros(3).any()
