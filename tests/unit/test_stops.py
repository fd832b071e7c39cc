from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.stops import StopScanner


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The truth: character by character, until a stop is at the end; of several, the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


_text = st.text(alphabet="ab<>é", max_size=30)
_stops = st.lists(st.text(alphabet="ab<>é", min_size=1, max_size=4), max_size=4)


@given(text=_text, stops=_stops, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_equals_the_naive_twin_whatever_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, seen = "", 0
    expected, stopped = naive(text, stops)
    for begin, end in itertools.pairwise(edges):
        shown += scanner.feed(text[begin:end])
        seen = end
        assert expected.startswith(shown)  # nothing is ever taken back
        if not scanner.stopped:
            assert seen - len(shown) < max(map(len, stops), default=1)  # held back only what may become a stop
    shown += scanner.flush()
    assert (shown, scanner.stopped) == (expected, stopped)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_stop_across_two_pieces_never_shows(cut: int) -> None:
    scanner = StopScanner(["STOP!"])
    shown = scanner.feed("so" + "STOP!"[:cut])
    assert shown == "so"
    assert scanner.feed("STOP!"[cut:] + "more") == ""
    assert scanner.stopped
    assert scanner.feed("more") == scanner.flush() == ""


def naive_after(text: str, stops: list[str], ripe: int) -> tuple[str, bool]:
    """The same where only stops that end after `ripe` characters count."""
    for end in range(ripe + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=_text, stops=_stops, cuts=st.lists(st.integers(0, 30), max_size=8), ripe=st.integers(0, 8))
def test_only_stops_that_end_late_enough_count(text: str, stops: list[str], cuts: list[int], ripe: int) -> None:
    scanner = StopScanner(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, allowed = "", 0
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        if number < ripe:
            allowed = end
        shown += scanner.feed(text[begin:end], may_stop=number >= ripe)
    shown += scanner.flush()
    expected, stopped = naive_after(text, stops, allowed)
    assert scanner.stopped == stopped
    assert shown == expected


def test_without_stops_nothing_is_held() -> None:
    scanner = StopScanner([])
    assert scanner.feed("abc") == "abc"
    assert scanner.flush() == ""
