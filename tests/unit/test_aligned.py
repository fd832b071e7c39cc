"""The time-aligned aggregate against closed forms, a naive twin and its own invariants."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.aligned import Aggregate, Rules, Stamp, Stream, aligned_aggregate

SHORT = Rules(min_window_s=2.0, min_busy_share=0.0)


def steady(begin: float, end: float, period: float, tokens: int = 1) -> Stream:
    count = int((end - begin) / period)
    return Stream(begin, end, tuple(Stamp(begin + k * period, tokens) for k in range(count)))


def closed_form(lanes: dict[str, list[Stream]]) -> float:
    """One long stream a lane: count the tokens of everyone between the last start and the first end."""
    begin = max(s.stamps[0].at_s for (s,) in lanes.values())
    end = min(s.end_s for (s,) in lanes.values())
    tokens = sum(x.tokens for (s,) in lanes.values() for x in s.stamps if begin <= x.at_s < end)
    return tokens / (end - begin)


def test_two_steady_lanes_equal_the_closed_form():
    lanes = {"a": [steady(0.0, 100.0, 0.125)], "b": [steady(10.0, 90.0, 0.25)]}
    got = aligned_aggregate(lanes)
    assert (got.begin_s, got.end_s, got.reasons) == (10.0, 90.0, ())
    assert got.tokens_per_s == 8 + 4 == closed_form(lanes)
    assert (got.lane_tokens_per_s("a"), got.lane_tokens_per_s("b")) == (8, 4)


def test_it_is_not_the_sum_of_lane_averages():
    # b is twice as fast while it has the host to itself, after a has ended
    fast_tail = tuple(Stamp(50 + k * 0.125) for k in range(400))
    b = Stream(0.0, 100.0, tuple(Stamp(k * 0.25) for k in range(200)) + fast_tail)
    got = aligned_aggregate({"a": [steady(0.0, 50.0, 0.25)], "b": [b]}, Rules(min_window_s=10, min_busy_share=0.0))
    assert got.tokens_per_s == pytest.approx(8.0)
    sum_of_averages = 200 / 50 + 600 / 100
    assert sum_of_averages == 10.0


@given(st.integers(1, 7), st.integers(1, 7))
def test_weights_by_token_count(weight_a, weight_b):
    lanes = {"a": [steady(0.0, 20.0, 0.5, weight_a)], "b": [steady(0.0, 20.0, 0.25, weight_b)]}
    assert aligned_aggregate(lanes, SHORT).tokens_per_s == pytest.approx(2 * weight_a + 4 * weight_b)


@given(st.floats(0.01, 5.0))
def test_a_gap_inside_the_window_invalidates(gap):
    stamps = [Stamp(t / 4) for t in range(40)]
    later = [Stamp(10.0 + gap + t / 4) for t in range(40)]
    end = later[-1].at_s
    holed = Stream(0.0, end, tuple(stamps[:-1] + later))
    got = aligned_aggregate({"a": [holed], "b": [steady(0.0, end + 1, 0.25)]}, SHORT)
    silence = later[0].at_s - stamps[-2].at_s
    assert got.valid == (silence <= 1.0)
    assert got.valid or "no token for" in got.reasons[0]


def test_silence_at_the_edge_of_the_window_counts_as_a_gap():
    early_end = Stream(0.0, 10.0, tuple(Stamp(k * 0.25) for k in range(30)))
    assert not aligned_aggregate({"a": [early_end], "b": [steady(0.0, 10.0, 0.25)]}, SHORT).valid


@pytest.mark.parametrize(("length", "valid"), [(60.0, True), (59.875, False)])
def test_a_short_window_invalidates_at_the_limit(length, valid):
    got = aligned_aggregate({"a": [steady(0.0, length, 0.125)], "b": [steady(0.0, length, 0.125)]})
    assert got.valid is valid


def test_a_window_that_is_a_small_part_of_a_busy_span_invalidates():
    lanes = {"a": [steady(0.0, 100.0, 0.25)], "b": [steady(0.0, 69.0, 0.25)]}
    got = aligned_aggregate(lanes)
    assert got.reasons == ("a: window covers less than 70% of its busy 100.000 s",)


def test_lanes_that_never_overlap_have_no_window():
    got = aligned_aggregate({"a": [steady(0.0, 10.0, 0.25)], "b": [steady(20.0, 30.0, 0.25)]}, SHORT)
    assert (got.tokens_per_s, got.window_s, got.valid) == (0.0, 0.0, False)


def test_a_lane_below_its_target_invalidates_by_name():
    got = aligned_aggregate({"a": [steady(0.0, 10.0, 0.25)], "b": []}, SHORT)
    assert got.reasons == ("b: never at 1 running",)


def test_the_target_concurrency_bounds_the_span():
    streams = [steady(0.0, 30.0, 0.25), steady(5.0, 20.0, 0.25)]
    got = aligned_aggregate({"a": streams}, Rules(target=2, min_window_s=1, min_busy_share=0.0))
    assert (got.begin_s, got.end_s, got.tokens_per_s) == (5.0, 20.0, 8.0)


@pytest.mark.parametrize(("pause", "end"), [(0.9, 19.9), (1.1, 10.0)])
def test_a_closed_loop_is_bridged_up_to_the_gap(pause, end):
    streams = [steady(0.0, 10.0, 0.25), steady(10.0 + pause, 19.0 + pause, 0.25)]
    got = aligned_aggregate({"a": streams}, Rules(min_window_s=1, min_busy_share=0.0))
    assert (got.begin_s, got.end_s) == (0.0, pytest.approx(end))


def test_warm_up_is_left_out():
    got = aligned_aggregate({"a": [steady(0.0, 30.0, 0.25)]}, Rules(warm_up_s=7.0, min_window_s=1, min_busy_share=0.0))
    assert (got.begin_s, got.tokens) == (7.0, 92)


@given(st.integers(0, 2**32 - 1))
def test_order_changes_nothing(seed):
    rng = random.Random(seed)
    lanes = {}
    for name in "abc":
        at, streams = rng.uniform(0, 2), []
        for _ in range(3):
            stamps = [at]
            for _ in range(rng.randint(1, 20)):
                stamps.append(stamps[-1] + rng.uniform(0, 0.6))
            streams.append(Stream(at, stamps[-1] + 0.1, tuple(Stamp(t, rng.randint(1, 4)) for t in stamps)))
            at = streams[-1].end_s + rng.uniform(0, 1.5)
        lanes[name] = streams
    first = aligned_aggregate(lanes, SHORT)
    shuffled: dict[str, list[Stream]] = {}
    for name in rng.sample(sorted(lanes), 3):
        streams = rng.sample(lanes[name], 3)
        shuffled[name] = [Stream(s.begin_s, s.end_s, tuple(rng.sample(s.stamps, len(s.stamps)))) for s in streams]
    assert aligned_aggregate(shuffled, SHORT) == first
    assert isinstance(first, Aggregate)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stamp(float("nan")),
        lambda: Stamp(0.0, 0),
        lambda: Stream(1.0, 0.0),
        lambda: Stream(0.0, 1.0, (Stamp(2.0),)),
        lambda: aligned_aggregate({}),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(ValueError, match=r"."):
        make()
