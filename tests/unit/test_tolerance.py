"""Margin-equal: how far logits may be apart, by the pack."""

import numpy as np
import pytest
import torch

from bench.near_tie import Apart, apart
from lanes.tolerance import BF16, FP32, TURNED, Compared, Tolerance, compare

WANT = np.array([[10.0, 0.0, 9.9, -20.0], [10.0, 5.0, 0.0, 1.0]], np.float32)


@pytest.mark.parametrize(
    ("dense", "experts", "common", "most"),
    [
        ("f32", "f32", FP32, FP32),
        ("bf16", "f32", BF16, BF16),
        ("f32", "q8", BF16, TURNED),
        ("bf16", "q4g64", BF16, TURNED),
    ],
)
def test_quantised_experts_are_allowed_more_in_some_rows(dense, experts, common, most):
    assert Tolerance.of(dense, experts) == Tolerance(common, most)


def test_a_row_is_measured_by_its_own_greatest_logit():
    got = WANT.copy()
    got[0, 1], got[1, 1] = 0.1, 5.3
    assert compare(got, WANT, Tolerance(0.1, 0.1)).offs == pytest.approx([0.1 / 20, 0.3 / 10], abs=1e-6)


def test_nine_rows_in_ten_and_none_beyond():
    offs, allowed = np.full(20, 0.02), Tolerance(0.02, 0.1)
    offs[:2] = 0.1
    assert Compared(offs, 0, 0).held(allowed)
    assert not Compared(np.append(offs, 0.03), 0, 0).held(allowed)
    offs[0] = 0.11
    assert not Compared(offs, 0, 0).held(allowed)


def test_another_token_counts_only_where_the_best_leads():
    got = WANT.copy()
    got[0, 2] = 10.1  # a tie that went the other way
    found = compare(got, WANT, Tolerance(0.02, 0.02))
    assert (found.sure, found.other) == (1, 0)
    assert found.held(Tolerance(0.02, 0.02))
    got[1] = WANT[1, ::-1]
    found = compare(got, WANT, Tolerance(0.24, 2.0))
    assert (found.sure, found.other) == (1, 1)
    assert not found.held(Tolerance(2.0, 2.0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_equal(value):
    got = WANT.copy()
    got[1, 3] = value
    assert not compare(got, WANT, Tolerance(0.9, 0.9)).held(Tolerance(0.9, 1e30))
    with pytest.raises(Apart, match="most inf"):
        apart(torch.from_numpy(got), torch.from_numpy(WANT), Tolerance(0.9, 0.9))


def test_in_words():
    got = torch.from_numpy(WANT).clone()
    got[0, 1] = 0.1
    text = apart(got, torch.from_numpy(WANT), Tolerance(0.02, 0.1))
    assert text == (
        "median 5.0e-03, 90th 5.0e-03 (2e-02), most 5.0e-03 of scale (1e-01), 0 other ids of 1 sure ones in 2"
    )


def test_a_row_may_be_further_apart_by_what_rounding_alone_moves_it():
    want = np.repeat(WANT[:1], 10, axis=0)
    rounded, got = want.copy(), want.copy()
    rounded[:3, 1], got[:3, 1] = 6.0, 6.3  # of 20: a third of the rows, 0.3 and 0.015 more
    allowed = Tolerance(0.02, 0.2)
    with pytest.raises(Apart):
        apart(torch.from_numpy(got), torch.from_numpy(want), allowed)
    text = apart(torch.from_numpy(got), torch.from_numpy(want), allowed, torch.from_numpy(rounded))
    assert text.endswith("; rounding alone: 0.0e+00, 3.0e-01, 3.0e-01")
    got[:3, 1] = 6.5  # 0.025 more
    with pytest.raises(Apart):
        apart(torch.from_numpy(got), torch.from_numpy(want), allowed, torch.from_numpy(rounded))


def test_a_sure_token_must_lead_by_what_rounding_moves_as_well():
    want, got, rounded = (np.float32([[10.0, 9.0, 0.0, 0.0]]) for _ in range(3))
    got[0, 1] = 10.1
    assert compare(got, want, Tolerance(0.04, 0.2)).other == 1
    rounded[0, 1] = 9.2
    moved = compare(rounded, want, Tolerance(0.04, 0.2)).offs
    assert compare(got, want, Tolerance(0.04, 0.2), moved).sure == 0
