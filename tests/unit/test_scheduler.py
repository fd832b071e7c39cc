from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduler import LaneLoad, choose

_lanes = st.lists(
    st.builds(LaneLoad, st.sampled_from("abcdef"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9)),
    unique_by=lambda lane: lane.name,
    max_size=6,
)


@given(lanes=_lanes, affine=st.sampled_from([None, *"abcdefg"]), order=st.randoms())
def test_the_rules(lanes: list[LaneLoad], affine: str | None, order) -> None:
    chosen = choose(lanes, affine)
    free = {lane.name: lane for lane in lanes if lane.load < lane.capacity}
    assert (chosen is None) == (not free)
    if chosen is not None:
        assert chosen in free
        if affine in free:
            assert chosen == affine
        else:
            assert free[chosen].load == min(lane.load for lane in free.values())
    shuffled = list(lanes)
    order.shuffle(shuffled)
    assert choose(shuffled, affine) == chosen


def test_idle_lanes_take_turns() -> None:
    last = dict.fromkeys("abc", 0)
    went: Counter[str] = Counter()
    for turn in range(1, 31):
        chosen = choose([LaneLoad(name, 0, 1, last[name]) for name in "abc"], None)
        assert chosen is not None
        last[chosen] = turn
        went[chosen] += 1
    assert went == {"a": 10, "b": 10, "c": 10}


def test_a_busy_own_lane_is_left_for_a_free_one() -> None:
    assert choose([LaneLoad("a", 1, 1, 0), LaneLoad("b", 0, 1, 5)], "a") == "b"
