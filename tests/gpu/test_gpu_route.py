"""The route kernel compiled for the GPU that is there."""

import pytest
import torch

from tests.fakes import kernel_route as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_route(rows, missing):
    for seed in range(20):
        cases.check_route("cuda", rows, 10, 512, seed=seed, missing=missing)
        cases.check_route("cuda", rows, 5, 24, seed=seed, missing=missing, ties=True)


def test_what_is_no_number():
    cases.check_route_of_what_is_no_number("cuda")


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_jobs_of_known_experts(rows, missing):
    for seed in range(20):
        cases.check_jobs("cuda", rows, 10, 512, seed=seed, missing=missing)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_routing_posts(rows):
    for seed in range(5):
        cases.check_posted("cuda", rows, 10, 512, 2560, seed=seed)
