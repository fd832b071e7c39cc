"""A VRAM budget divided: nothing is planned twice, and what does not fit is refused with its parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.device.budget import Needs, plan
from lanes.errors import VramTooSmall

GIB = 1 << 30
sizes = st.integers(0, 1 << 36)


@given(
    budget=sizes, reserve=sizes, needs=st.builds(Needs, sizes, sizes, sizes, sizes, sizes, sizes),
    record=st.integers(4096, 1 << 23), records=st.integers(1, 30_000),
)  # fmt: skip
def test_the_parts_never_exceed_the_budget(budget, reserve, needs, record, records):
    if reserve + needs.total_bytes + needs.lent_bytes > budget:
        with pytest.raises(VramTooSmall):
            plan(budget, reserve, needs, record, records)
        return
    found = plan(budget, reserve, needs, record, records)
    assert 0 <= found.slots <= records
    assert found.left_bytes >= 0
    assert found.left_bytes < record or found.slots == records
    assert 0 <= found.spare <= found.slots
    assert found.spare * record + found.left_bytes >= needs.lent_bytes
    assert found.spare == 0 or (found.spare - 1) * record + found.left_bytes < needs.lent_bytes, "no more than it takes"
    assert found.most_allocated_bytes == budget - reserve - needs.context_bytes


def test_at_the_edge_and_a_byte_below_it():
    needs = Needs(GIB, 9 * GIB, GIB, GIB // 4, GIB // 4)
    exact = needs.total_bytes + GIB
    assert plan(exact, GIB, needs, 2_613_248, 24_576).slots == 0
    assert plan(exact + 2_613_248, GIB, needs, 2_613_248, 24_576).slots == 1
    with pytest.raises(VramTooSmall, match=r"12800 MiB are 1 MiB too few .*dense weights 9216, one conversation 1024"):
        plan(exact - 1, GIB, needs, 2_613_248, 24_576)


def test_a_model_that_fits_is_cached_whole():
    assert plan(1 << 40, GIB, Needs(1, 1, 1, 1, 1), 2_613_248, 24_576).slots == 24_576
