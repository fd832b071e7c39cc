"""The small kernels of a prompt's rows on a GPU, at sizes of the released model and odd ones."""

import pytest
import torch

from lanes.kernels.deltanet import DeltaShape
from tests.fakes import kernel_prompt as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("owed", [False, True])
@pytest.mark.parametrize(("rows", "streams", "hidden", "lowrank"), [(1000, 4, 2560, 320), (77, 4, 640, 80)])
def test_hyper_connections(rows, streams, hidden, lowrank, owed):
    cases.check_mixing("cuda", rows, streams, hidden, lowrank, torch.bfloat16, owed=owed)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("rows", [5, 1000])
def test_both_sides_of_the_rule(rows, silu):
    cases.check_delta("cuda", rows, DeltaShape(16, 48, 128, 128, 4), torch.bfloat16, silu=silu)


@pytest.mark.parametrize(("rows", "experts", "chosen"), [(1000, 512, 10), (9, 40, 6)])
def test_routing(rows, experts, chosen):
    cases.check_route("cuda", rows, experts, chosen, normalise=True)
