"""The small kernels between products, in the interpreter."""

import pytest
import triton

from lanes.kernels import sampling
from tests.fakes import kernel_dense as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize(("rows", "streams", "hidden"), [(1, 4, 96), (3, 2, 64)])
def test_the_streams(rows, streams, hidden):
    cases.check_enter("cpu", rows, streams, hidden)


@pytest.mark.parametrize("vocabulary", [64, 65, 300])
def test_greatest(monkeypatch, vocabulary):
    monkeypatch.setattr(sampling, "BLOCK", 64)
    cases.check_greatest("cpu", 3, vocabulary)


def test_uniform():
    cases.check_uniform("cpu")
