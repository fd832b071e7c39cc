"""The DeltaNet kernels in the interpreter."""

import pytest
import triton

from lanes.kernels import deltanet
from lanes.kernels.deltanet import DeltaShape
from tests.fakes import kernel_deltanet as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.mark.parametrize(
    ("shape", "windows"),
    [
        (DeltaShape(1, 2, 16, 16, 4), [(1, 1), (1, 1), (4, 2), (3, 0), (2, 2), (4, 4), (1, 1)]),
        (DeltaShape(2, 2, 16, 16, 2), [(4, 3), (4, 1)]),
        (DeltaShape(1, 3, 16, 16, 5), [(4, 1), (1, 1), (2, 1)]),  # a tail that outlives several windows
        (DeltaShape(2, 4, 32, 16, 4), [(1, 1), (4, 3), (2, 1)]),  # keys and values of two sizes
        (DeltaShape(1, 2, 16, 32, 4), [(4, 3), (2, 1)]),
    ],
)
def test_windows_with_rejected_rows(shape, windows):
    cases.check_windows("cpu", shape, windows)


@pytest.mark.parametrize("one_launch", [2, 4])
@pytest.mark.parametrize("shape", [DeltaShape(1, 3, 16, 16, 4), DeltaShape(2, 2, 16, 16, 2)])
def test_windows_in_one_launch(shape, one_launch):
    windows = [(1, 1), (2, 1), (4, 3), (1, 0), (2, 2), (4, 4), (1, 1)]
    cases.check_windows("cpu", shape, windows, one_launch=one_launch)


def test_a_head_in_several_programs(monkeypatch):
    monkeypatch.setattr(deltanet, "COLUMNS", 8)
    cases.check_windows("cpu", DeltaShape(1, 1, 16, 16, 4), [(2, 1)])
