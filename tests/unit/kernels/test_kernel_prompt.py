"""The small kernels of a prompt's rows, in the interpreter."""

import pytest
import torch
import triton

from lanes.kernels.deltanet import DeltaShape
from tests.fakes import kernel_prompt as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "streams", "hidden", "lowrank", "owed"),
    [(1, 4, 64, 16, True), (17, 4, 40, 20, False), (33, 2, 64, 80, True)],
)
def test_hyper_connections(rows, streams, hidden, lowrank, owed, dtype):
    cases.check_mixing("cpu", rows, streams, hidden, lowrank, dtype, owed=owed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "silu", "taps"), [(1, True, 4), (18, False, 4), (40, True, 2)])
def test_both_sides_of_the_rule(rows, silu, taps, dtype):
    cases.check_delta("cpu", rows, DeltaShape(2, 4, 16, 16, taps), dtype, silu=silu)


@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "normalise"), [(1, 8, 1, False), (9, 40, 6, True), (6, 64, 10, False)]
)
def test_routing(rows, experts, chosen, normalise):
    cases.check_route("cpu", rows, experts, chosen, normalise=normalise)
