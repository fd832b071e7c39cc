"""The split of misses: what the CPU is told of it is its work, and the table is the best one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.experts.native import ExpertKernel
from lanes.experts.split import cpu_share_table, marked, split
from shared_experts.layout import Q4G32, RecordLayout


@pytest.fixture(scope="module")
def library():
    return ExpertKernel(RecordLayout.of(Q4G32, 32, 32)).native().library


def native_work(library, told, experts):
    rows, chosen = told.shape
    flat = np.ascontiguousarray(told, np.int32)
    taken, offsets, pair_rows = (np.full(rows * chosen + 1, -7, np.int32) for _ in range(3))
    count = library.expert_work(
        rows, chosen, flat.ctypes.data, experts, *(a.ctypes.data for a in (taken, offsets, pair_rows))
    )
    if count < 0:
        return None
    return taken[:count], offsets[: count + 1], pair_rows[: offsets[count]]


@st.composite
def layers(draw):
    experts = draw(st.integers(1, 24))
    chosen, rows = draw(st.integers(1, experts)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.choice(experts, chosen, replace=False)) for _ in range(rows)]).astype(np.int32)
    resident = rng.random(experts) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    table = np.minimum(rng.integers(-1, rows * chosen + 3, rows * chosen + 1), 99).astype(np.int32)
    return ids, resident, table


@settings(max_examples=300)
@given(case=layers())
def test_what_the_cpu_is_told_is_its_work(library, case):
    ids, resident, table = case
    table = np.minimum(table, np.arange(len(table), dtype=np.int32))
    want = split(ids, resident, table)
    got = native_work(library, marked(ids, want.slots), len(resident))
    for a, b in zip((want.taken, want.offsets, want.pair_rows), got, strict=True):
        np.testing.assert_array_equal(a, b)
    # What the CPU takes are misses, and every pair of them has a slot of its own, by (expert, row).
    flat = ids.reshape(-1)
    assert not resident[want.taken].any()
    assert sorted(want.slots[want.slots >= 0]) == list(range(len(want.pair_rows)))
    np.testing.assert_array_equal(np.isin(flat, want.taken), want.slots >= 0)
    rows = np.arange(len(flat)) // ids.shape[1]
    order = sorted(np.flatnonzero(want.slots >= 0), key=lambda p: (flat[p], rows[p]))
    assert want.slots[order].tolist() == list(range(len(order)))


@settings(max_examples=50)
@given(case=layers())
def test_a_table_beyond_the_misses_takes_them_all(case):
    ids, resident, table = case
    table[:] = 99
    assert len(split(ids, resident, table).taken) == len(set(ids[~resident[ids]].tolist()))


def test_ids_out_of_range_or_order_are_refused(library):
    for ids in ([[0, 4]], [[0, ~4]], [[2, 1]], [[1, 1]], [[1, ~1]], [[~2, ~1]], [[0, -(2**31)]]):
        assert native_work(library, np.array(ids, np.int32), 4) is None
    taken, offsets, rows = native_work(library, np.array([[0, ~3], [~0, 1]], np.int32), 4)
    assert (taken.tolist(), offsets.tolist(), rows.tolist()) == ([0, 1], [0, 1, 2], [0, 1])


@given(
    most=st.integers(0, 40), link=st.floats(1, 100), cpu=st.floats(1, 100), start=st.floats(0, 100)
)  # fmt: skip
def test_the_table_is_the_best_by_trying_all(most, link, cpu, start):
    table = cpu_share_table(most, link, cpu, start)

    def time(misses, taken):
        return max((misses - taken) * link, start + taken * cpu if taken else 0.0)

    for misses in range(most + 1):
        assert time(misses, table[misses]) == min(time(misses, taken) for taken in range(misses + 1))


def test_measured_rates():
    # 56 us an expert by link, 36 by the CPU and 30 to begin: one miss stays with the link.
    assert cpu_share_table(10, 56.0, 36.0, 30.0)[[0, 1, 2, 10]].tolist() == [0, 0, 1, 6]
