"""Whose core is whose: lanes never share one unasked, doors have theirs beside GPU lanes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cores import SPARE_FROM, cores_of_a_lane, layout, ranges, spare
from coordinator.errors import BadOption


def test_cpu_lanes_have_all_cores_and_share_only_when_there_are_too_few():
    assert layout([0, 1, 2, 3, 4], 2, gpu=False).lanes == ((0, 1), (2, 3))
    assert layout([3, 7], 1, gpu=False).lanes == ((3, 7),)
    assert layout([3, 7], 4, gpu=False).lanes == ((3,), (7,), (3,), (7,))
    assert layout([0, 1, 2, 3], 2, 1, gpu=False).lanes == ((0,), (1,))
    assert layout([0, 1, 2, 3], 2, 2, gpu=False).lanes == ((0, 1), (2, 3))
    assert layout(range(32), 2, 10, gpu=False).doors == ()
    for gpu in (False, True):
        with pytest.raises(BadOption, match="2 lanes × 3 cores, but only 4 are allowed"):
            layout([0, 1, 2, 3], 2, 3, gpu=gpu)
        with pytest.raises(BadOption, match="5 cores per lane, but only 4 are allowed"):
            layout([0, 1, 2, 3], 2, 5, gpu=gpu)


@pytest.mark.parametrize(
    ("cores", "lanes", "each", "doors"),
    [(4, 1, 4, 0), (8, 1, 7, 1), (16, 1, 15, 1), (16, 2, 7, 2), (32, 2, 15, 2), (32, 1, 30, 2), (64, 4, 15, 4),
     (128, 8, 15, 8), (23, 1, 22, 1), (24, 1, 22, 2)],
)  # fmt: skip
def test_beside_gpu_lanes_of_a_large_host_doors_have_cores_of_their_own(cores, lanes, each, doors):
    found = layout(range(cores), lanes, gpu=True)
    assert {len(own) for own in found.lanes} == {each}
    assert len(found.doors) == doors
    assert len(found.told()) == lanes + 1


def test_who_asks_for_all_cores_gets_them():
    found = layout(range(32), 2, 16, gpu=True)
    assert (len(found.lanes[1]), found.doors, found.told()["doors"]) == (16, (), "any")


@given(st.integers(1, 300), st.integers(1, 16), st.booleans())
def test_nothing_is_given_twice_and_more_is_never_less(count, lanes, gpu):
    found = layout(range(100, 100 + count), lanes, gpu=gpu)
    assert len(found.lanes) == lanes
    assert all(own and own == tuple(sorted(own)) for own in found.lanes if count >= lanes)
    given_out = [core for own in (*found.lanes, found.doors) for core in own]
    if cores_of_a_lane(count, lanes, gpu=gpu):
        assert len(set(given_out)) == len(given_out)
        assert set(given_out) <= set(range(100, 100 + count))
        assert len(found.doors) >= spare(count, gpu=gpu)
    assert len(layout(range(count + 1), lanes, gpu=gpu).lanes[0]) >= len(found.lanes[0])


def test_small_hosts_spare_nothing():
    assert [spare(cores, gpu=True) for cores in (1, SPARE_FROM[0] - 1, SPARE_FROM[0], SPARE_FROM[1])] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("cores", "said"), [((), ""), ((4,), "4"), ((0, 1, 2), "0-2"), ((3, 0, 1, 5, 6), "0-1,3,5-6")]
)  # fmt: skip
def test_runs_are_told_as_ranges(cores, said):
    assert ranges(cores) == said
