"""The route kernel in the interpreter."""

import pytest
import triton

from tests.fakes import kernel_route as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0])
def test_route(rows, missing):
    cases.check_route("cpu", rows, 5, 24, seed=rows, missing=missing)


def test_ties_take_the_lowest_id():
    for seed in range(4):
        cases.check_route("cpu", 2, 10, 64, seed=seed, ties=True)


def test_weights_of_the_whole_softmax():
    cases.check_route("cpu", 2, 4, 16, normalise=False)


def test_every_expert_chosen():
    cases.check_route("cpu", 2, 8, 8)


def test_what_is_no_number():
    cases.check_route_of_what_is_no_number("cpu")


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0])
def test_jobs_of_known_experts(rows, missing):
    for seed in range(6):
        cases.check_jobs("cpu", rows, 5, 24, seed=seed, missing=missing)
    cases.check_jobs("cpu", rows, 1, 3, missing=missing)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_routing_posts(rows):
    cases.check_posted("cpu", rows, 3, 12, 288, seed=rows)
