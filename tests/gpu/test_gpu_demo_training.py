"""A recorded training step leaves the gradients of one that is not."""

import pytest
import torch

from deploy.demo_model.recorded import Recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_every_call_leaves_its_own_gradients():
    matrix = torch.nn.Parameter(torch.randn(8, 8, device="cuda"))

    def compute(batch, taught):
        loss = (batch @ matrix).square().sum() + taught.sum()
        loss.backward()
        return {"main": loss.detach()}

    taught = torch.zeros(2, device="cuda")
    recorded = Recorded(compute, torch.randn(4, 8, device="cuda"), taught, [matrix])
    for _ in range(3):
        batch = torch.randn(4, 8, device="cuda")
        loss = float(recorded(batch, taught)["main"])
        assert loss == pytest.approx(float((batch @ matrix).square().sum().detach()), rel=1e-4)
        torch.testing.assert_close(matrix.grad, 2 * batch.T @ (batch @ matrix.detach()), rtol=1e-3, atol=1e-3)
