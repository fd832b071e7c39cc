"""Where a decode window of a GPU lane is cut into graphs."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lanes.models.qwen4_exp.gpu.window import FIRST, GROWTH, cuts


def test_the_true_model_is_launched_by_four_graphs_the_first_of_one_layer():
    assert cuts(193, 4) == (0, 4, 12, 44, 193)
    assert cuts(193, 0) == (0, 0, 8, 40, 193), "n-gram rows are read by the first block"


@given(st.integers(1, 1000), st.integers(0, FIRST))
def test_parts_are_all_steps_and_none_is_longer_than_its_forerunners_can_hide(steps, first):
    at = cuts(steps, first)
    sizes = [end - begin for begin, end in pairwise(at)]
    assert at[0] == 0
    assert at[-1] == steps
    assert sizes[0] == min(first, steps)
    assert all(size > 0 for size in sizes[1:])
    for before, after in pairwise(sizes[1:]):
        assert after <= 3 * GROWTH * before
