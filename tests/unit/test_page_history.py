"""Rates, curves and shares against the plain arithmetic that they stand for; changes of lanes' states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import limits
from coordinator.fleet.lane_view import LaneView
from coordinator.page.changes import Change, Changes
from coordinator.page.history import History, Sample, curve, rate, share


def samples(*pairs):
    return [Sample(at, {"lane-0": {"x": value, "y": 3 * value}}) for at, value in pairs]


def test_a_rate_is_over_the_last_seconds_only():
    seen = samples((0, 0), (1, 100), (2, 100), (7, 150), (8, 160))
    assert rate(seen, "lane-0", "x", 5) == (160 - 150) / 1
    assert rate(seen, "lane-0", "x", 6) == (160 - 100) / 6
    assert rate(seen, "lane-0", "x", 100) == 20
    assert rate(seen[:1], "lane-0", "x") == rate([], "lane-0", "x") == 0
    assert rate(seen, "lane-9", "x") == rate(seen, "lane-0", "z") == 0


def test_a_curve_has_one_point_between_each_two_samples():
    assert curve(samples((0, 0), (1, 10), (3, 10), (4, 25)), "lane-0", "x") == [10, 0, 15]
    assert curve(samples((0, 0)), "lane-0", "x") == []


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1 << 60)), max_size=20))
def test_rates_are_finite_and_never_negative_whatever_comes(pairs):
    seen = samples(*sorted(pairs))
    for value in (rate(seen, "lane-0", "x"), *curve(seen, "lane-0", "x")):
        assert 0 <= value < float("inf")
    assert 0 <= sum(share(seen, "lane-0", ("x", "y")).values()) <= 1.000001


def test_shares_are_of_lately_and_else_of_all_time():
    lately = [Sample(0, {"l": {"a": 90, "b": 10}}), Sample(9, {"l": {"a": 91, "b": 13}})]
    assert share(lately, "l", ("a", "b")) == {"a": 0.25, "b": 0.75}
    idle = [Sample(0, {"l": {"a": 90, "b": 10}}), Sample(9, {"l": {"a": 90, "b": 10}})]
    assert share(idle, "l", ("a", "b")) == {"a": 0.9, "b": 0.1}
    assert share([], "l", ("a",)) == share(idle, "other", ("a",)) == {"a": 0}


@pytest.mark.parametrize("more", [0, 1])
def test_the_newest_samples_are_kept(more):
    history = History()
    for number in range(limits.PAGE_SAMPLES + more):
        history.add(Sample(number, {}))
    assert [sample.at_s for sample in history.samples] == list(range(more, limits.PAGE_SAMPLES + more))


def view(state, incarnation=b"1", name="lane-0"):
    return LaneView(name, "", state, incarnation)


def test_deaths_and_returns_are_noted_once():
    changes = Changes()
    for now, state in ((1, "ready"), (2, "ready"), (5, "dead"), (6, "starting"), (9, "ready")):
        changes.look([view(state)], now)
    assert [(c.at_s, c.before, c.after) for c in changes.latest] == [
        (1, "", "ready"), (5, "ready", "dead"), (6, "dead", "starting"), (9, "starting", "ready"),
    ]  # fmt: skip
    assert changes.since_s("lane-0", 20) == 11
    assert changes.since_s("lane-7", 20) == 0


def test_another_process_between_two_looks_is_a_death():
    changes = Changes()
    changes.look([view("ready", b"1")], 1)
    changes.look([view("ready", b"2")], 2)
    assert list(changes.latest)[1:] == [
        Change(2, "lane-0", "ready", "dead"), Change(2, "lane-0", "dead", "ready"),
    ]  # fmt: skip


@pytest.mark.parametrize("more", [0, 1])
def test_the_newest_changes_are_kept(more):
    changes = Changes()
    for number in range(limits.PAGE_CHANGES + more):
        changes.look([view("ready", name=f"lane-{number}")], number)
    assert [change.at_s for change in changes.latest] == list(range(more, limits.PAGE_CHANGES + more))
