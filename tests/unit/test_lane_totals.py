"""Lane counters across lives: never less, nothing counted twice."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.fleet.lane_view import LaneView
from coordinator.telemetry.lane_totals import FIELDS, LEVELS, LaneTotals
from laneproto.v1 import lane_pb2


def view(incarnation: bytes, name: str = "lane-0", **counters: int) -> LaneView:
    return LaneView(name, "", "ready", incarnation, counters=lane_pb2.Counters(**counters))


def test_a_new_life_adds_to_the_old_ones():
    totals = LaneTotals()
    totals.look([view(b"a", requests=3, cache_used_bytes=50)])
    totals.look([view(b"a", requests=5, cache_used_bytes=40)])
    assert totals.of("lane-0")["requests"] == 5
    totals.look([view(b"", requests=5, cache_used_bytes=40)])  # it died
    totals.look([view(b"")])  # its successor has not said hello
    assert totals.of("lane-0")["requests"] == 5
    totals.look([view(b"b", requests=1, cache_used_bytes=7)])
    totals.look([view(b"b", requests=2, cache_used_bytes=9)])
    assert totals.of("lane-0")["requests"] == 7
    assert totals.of("lane-0")["cache_used_bytes"] == 9  # a size is of now


def test_lanes_are_apart_and_unknown_ones_are_zero():
    totals = LaneTotals()
    totals.look([view(b"a", "lane-0", windows=1), view(b"b", "lane-1", windows=10)])
    assert [totals.of(name)["windows"] for name in ("lane-0", "lane-1", "lane-2")] == [1, 10, 0]


lives = st.lists(st.lists(st.integers(0, 1000), max_size=6).map(sorted), max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a loaded machine
@given(lives, st.data())
def test_totals_never_fall_and_end_at_the_sum_of_what_each_life_said_last(counts, data):
    totals, before, expected = LaneTotals(), 0, 0
    for number, life in enumerate(counts):
        for count in life:
            totals.look([view(bytes([number + 1]), requests=count)])
            if data.draw(st.booleans()):
                totals.look([view(b"", requests=data.draw(st.sampled_from([0, count])))])
            now = totals.of("lane-0")["requests"]
            assert now >= before
            before = now
        expected += life[-1] if life else 0
    assert totals.of("lane-0")["requests"] == expected


def test_levels_are_fields():
    assert set(FIELDS) > LEVELS
