"""The expert kernels in Triton's interpreter: bit-equal to the reference, which lanes/native is bit-equal to."""

import pytest
import triton

from lanes.kernels import combine, experts
from tests.fakes import kernel_experts as cases

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here: tests/gpu")


@pytest.fixture
def few_programs(monkeypatch):
    """The largest tiles that fit: the interpreter takes its time for each program, whatever its size."""

    def set_tiles(hidden: int, inner: int) -> None:
        monkeypatch.setattr(experts, "GATE_TILE", (inner & -inner, 4))
        monkeypatch.setattr(experts, "DOWN_TILE", (hidden & -hidden, 4))

    return set_tiles


def test_arithmetic():
    cases.check_arithmetic("cpu")


@pytest.mark.parametrize(
    ("format", "hidden", "inner", "ids"),
    [
        ("q4g64", 128, 64, [[0, 2]]),
        ("q4g64", 1152, 64, [[1]]),  # 18 groups: more steps than are loaded ahead, the last one not full
        ("q4g64", 64, 576, [[0]]),  # 9 groups of the intermediate
        ("q4g32", 96, 32, [[0, 1], [1, 2]]),  # one expert has both rows
        ("q4g32", 32, 288, [[0], [0], [0]]),  # three rows of four
        ("q8", 128, 64, [[0, 1], [1, 2], [0, 2], [1, 3]]),
        ("q8", 64, 640, [[0]]),
        ("q4g64", 64, 64, [[0, 1], [0, 1], [0, 2], [0, 1]]),  # one expert has all rows
    ],
)
def test_every_bit(few_programs, format, hidden, inner, ids):
    few_programs(hidden, inner)
    cases.check_experts("cpu", format, hidden, inner, ids)


@pytest.mark.parametrize("format", ["q4g64", "q8"])
def test_hostile_records_and_activations(few_programs, format):
    few_programs(128, 64)
    cases.check_experts("cpu", format, 128, 64, [[0, 1], [1, 2]], hostile=True, seed=3)


def test_tiles_as_they_are_and_a_job_that_is_not_ours():
    cases.check_experts("cpu", "q4g32", 96, 32, [[0, 1]], skipped=frozenset({1}))


def test_combine_from_both_sources(monkeypatch):
    monkeypatch.setattr(combine, "COLUMNS", 64)
    cases.check_combine("cpu", 2, 5, 96)
    cases.check_combine("cpu", 1, 1, 64)


def test_what_is_sent_for_meanwhile_changes_no_bit():
    cases.check_experts("cpu", "q4g32", 64, 32, [[0, 2]], skipped=frozenset({1}), ahead=True)
