"""What is kept of requests: living ones whole, ended ones bounded, tokens by the lane that they came from."""

from dataclasses import replace

import pytest

from coordinator import limits
from coordinator.request import Draft, check
from coordinator.sampling import Defaults, Wanted
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.stats import Silent, Timeline
from laneproto.v1 import lane_pb2
from tests.unit.test_metrics import MODEL


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(number=0, **fields):
    draft = Draft((1, 2, 3), "prompt", 7, Defaults(0.5), Wanted(), max_tokens=50, **fields)
    return check(draft, request_id=f"r{number}", model=MODEL)


def begun(journal, clock, number=0, **fields):
    record = journal.record(asked(number, **fields), "http", clock())
    timeline = Timeline(Silent(), "http", clock, record, journal.ended)
    journal.opened(record)
    return record, timeline


def tokens(*stamps_s):
    return [lane_pb2.Token(stamp_ns=round(each * 1e9)) for each in stamps_s]


def test_a_request_from_its_place_in_the_queue_to_its_end():
    clock, kept = Clock(), []
    journal = Journal(kept.append)
    record, timeline = begun(journal, clock, session="agent")
    assert (record.lane, record.session, record.prompt_tokens, record.max_tokens) == ("", "agent", 3, 50)
    clock.now = 101.0
    timeline.accepted(3, "lane-1")
    clock.now = 103.5
    timeline.tokens(tokens(103.4, 103.45))
    assert (record.lane, record.begun_s, record.first_token_s, record.tokens) == ("lane-1", 101.0, 103.5, 2)
    assert journal.answered() == {"lane-1": 2}
    clock.now = 104.0
    timeline.ended("stop", 2)
    timeline.ended("cancelled")
    assert kept == [record]
    assert (record.outcome, record.ended_s, record.cached_tokens) == ("stop", 104.0, 2)
    assert list(record.stamps_ns) == [103_400_000_000, 103_450_000_000]
    assert not journal.living
    assert not journal.failures
    assert [(first.lane, first.seconds) for first in journal.first_tokens] == [("lane-1", 3.5)]
    assert journal.answered() == {"lane-1": 2}


def test_tokens_belong_to_the_lane_that_sent_them_also_when_another_one_goes_on():
    clock, journal = Clock(), Journal()
    record, timeline = begun(journal, clock)
    timeline.accepted(3, "lane-0")
    timeline.tokens(tokens(1, 2, 3))
    timeline.accepted(3, "lane-1")
    timeline.tokens(tokens(9, 10))
    assert list(record.tokens_by_lane()) == [("lane-0", 3), ("lane-1", 2)]
    timeline.accepted(3, "lane-0")
    assert journal.answered() == {"lane-0": 3, "lane-1": 2}
    timeline.tokens(tokens(11))
    timeline.ended("length")
    assert journal.answered() == {"lane-0": 4, "lane-1": 2}
    assert record.begun_s == clock.now
    assert record.stamps_ns is None  # nobody wants them


@pytest.mark.parametrize("outcome", ["stop", "length", "cancelled"])
def test_a_good_end_is_no_failure(outcome):
    clock, journal = Clock(), Journal()
    begun(journal, clock)[1].ended(outcome)
    assert not journal.failures


def test_an_end_before_the_request_was_opened_leaves_nothing():
    clock, journal = Clock(), Journal()
    record = journal.record(asked(), "http", 0.0)
    Timeline(Silent(), "http", clock, record, journal.ended).ended("lane_lost")
    journal.opened(record)
    assert not journal.living
    assert list(record.tokens_by_lane()) == []


def test_what_is_kept_of_ended_requests_is_bounded():
    clock, journal = Clock(), Journal()
    for number in range(limits.PAGE_FIRST_TOKENS + 1):
        if number == limits.PAGE_FIRST_TOKENS:
            assert len(journal.first_tokens) == number  # at the limit nothing has gone yet
        clock.now += 1
        _, timeline = begun(journal, clock, number)
        timeline.accepted(3, f"lane-{number}")
        timeline.tokens(tokens(number))
        timeline.ended("lane_lost")
        if number in (limits.PAGE_FAILURES - 1, limits.PAGE_FAILURES):
            assert journal.failures[0].id == f"r{number + 1 - limits.PAGE_FAILURES}"
    assert len(journal.failures) == limits.PAGE_FAILURES
    assert journal.failures[-1].id == f"r{limits.PAGE_FIRST_TOKENS}"
    assert len(journal.first_tokens) == limits.PAGE_FIRST_TOKENS
    assert journal.first_tokens[0].lane == "lane-1"


def test_a_request_of_a_tenant():
    tenant = replace(asked().tenant, name="team")
    assert begun(Journal(), Clock(), tenant=tenant)[0].tenant == "team"
