"""The delta rule of a prompt's rows compiled for the GPU that is there, at the true sizes too."""

import pytest
import torch

from tests.fakes import kernel_delta_chunks as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_any_number_of_tokens(tokens):
    cases.check_chunks("cuda", tokens, 3, 16, 32, seed=tokens)


@pytest.mark.parametrize(("forgets", "alike"), [(0.0, 0.0), (30.0, 0.0), (0.01, 1.0)])
def test_the_true_sizes(forgets, alike):
    cases.check_chunks("cuda", 2500, 48, 128, 128, forgets=forgets, alike=alike)
