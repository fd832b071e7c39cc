"""What is believed of times that nobody takes: a hope beside what was measured, which one look ends."""

import pytest

from lanes.drafts.policy import Beliefs, Guessed, Round, learn
from lanes.drafts.proposal import NOTHING, Proposal
from lanes.drafts.times import FAST, MOST_LONGER, MOST_STALL, SETTLING, Mean, hoped, line, looked_at, timed

ONE = Round(NOTHING, Guessed(), 0, 100, 0, 0)


def four(window_ns: int) -> Round:
    return Round(Proposal("lookup", (5, 6, 7), (0.9,) * 3), Guessed(), 0, window_ns, 3, 3)


def known(count: int) -> Beliefs:
    """Four rows take 300, their line says 190."""
    times = [Mean(float(ns), 99) for ns in (100, 130, 160)]
    return Beliefs(windows_ns=(*times, Mean(300.0, count)))


def waited(beliefs: Beliefs, rounds: int) -> Beliefs:
    for _ in range(rounds):
        beliefs = learn(beliefs, ONE)
    return beliefs


def test_a_hope_grows_while_nobody_looks_and_ends_when_somebody_does():
    beliefs = waited(known(99), 200)
    assert 190.0 < beliefs.window_ns(4) < 200.0
    assert beliefs.windows_ns[3] == Mean(300.0, 99), "what was measured stays"
    assert beliefs.hoped_ns[:3] == (0.0,) * 3, "on the line, or one row"
    after = learn(beliefs, four(300))
    assert after.window_ns(4) == 300.0
    assert after.hoped_ns[3] == 0.0


def test_a_hope_that_comes_true_is_kept():
    after = learn(waited(known(99), 200), four(150))
    assert after.window_ns(4) < 195.0


def test_first_times_end_no_hope():
    """They may all have been long."""
    after = learn(waited(known(SETTLING - 1), 200), four(300))
    assert after.window_ns(4) < 210.0
    assert learn(waited(known(2), 30), four(170)).window_ns(4) == 170.0, "and a shorter one takes their place"


def test_nothing_is_hoped_of_what_lies_below_its_line_or_of_one_time():
    times = (Mean(100.0, 9), Mean(150.0, 9), Mean(160.0, 9), Mean(500.0, 1))
    assert hoped(times, (0.0,) * 4, 1) == (0.0, (150.0 - 130.0) / 64, 0.0, 0.0)


def test_the_line_goes_through_the_longest_shorter_window_else_the_shortest_longer_one():
    times = (Mean(100.0, 9), Mean(), Mean(160.0, 9), Mean(900.0, 1))
    assert [line(times, rows) for rows in (2, 3, 4)] == [130.0, 200.0, 190.0]
    assert line((Mean(100.0, 9), Mean(), Mean()), 3) == 200.0, "nothing is known"


@pytest.mark.parametrize("settles", [False, True])
def test_a_stall_moves_a_mean_a_little(settles):
    most = MOST_LONGER if settles else MOST_STALL
    assert timed(Mean(100.0, 99), 10**9, settles=settles).value == pytest.approx(100.0 + 100.0 * (most - 1) * FAST)
    assert timed(Mean(), 70, settles=settles) == Mean(70.0, 1)


def test_what_a_time_is_added_to():
    assert looked_at(Mean(100.0, 9), 0.0, 10) == Mean(100.0, 9)
    assert looked_at(Mean(100.0, 9), 20.0, 81) == Mean(100.0, 9)
    assert looked_at(Mean(100.0, 9), 20.0, 79) == Mean(80.0, 9)
    assert looked_at(Mean(100.0, SETTLING - 1), 20.0, 81) == Mean(80.0, SETTLING - 1)
