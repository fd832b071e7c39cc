"""Sessions, priority and patience from the heads of requests."""

import pytest

from coordinator import limits
from coordinator.doors.caller import parse_caller
from coordinator.errors import BadRequest, OutOfRange
from coordinator.serving import Caller
from coordinator.tenants import Priority


def of(**headers):
    return parse_caller({name.replace("_", "-"): value for name, value in headers.items()}, "r")


def test_nothing_said():
    assert of() == Caller("r")


@pytest.mark.parametrize("name", ["x_session_id", "x_session_affinity", "session_id", "x_claude_code_session_id"])
def test_the_first_name_that_is_there_is_the_session(name):
    assert of(**{name: "a"}).session == "a"
    assert of(x_session_id="first", session_id="later").session == "first"


def test_subagents_have_sessions_below_that_of_their_agent():
    agent = of(x_claude_code_session_id="s", x_claude_code_agent_id="1")
    assert (agent.session, agent.parent_session) == ("s/1", "s")
    below = of(x_claude_code_session_id="s", x_claude_code_agent_id="2", x_claude_code_parent_agent_id="1")
    assert (below.session, below.parent_session) == ("s/2", "s/1")
    named = of(x_session_id="b", x_parent_session_id="a")
    assert (named.session, named.parent_session) == ("b", "a")
    assert of(x_claude_code_agent_id="1").session is None  # an agent of no session


def test_priority_and_patience():
    assert of(x_priority="batch").priority is Priority.BATCH
    assert of(x_request_timeout_s="2.5").timeout_s == 2.5
    with pytest.raises(OutOfRange) as caught:
        of(x_priority="urgent")
    assert caught.value.param == "x-priority"
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        with pytest.raises(OutOfRange):
            of(x_request_timeout_s=wrong)


def test_ids_are_bounded_also_when_joined():
    half = "x" * (limits.SESSION_CHARS // 2)
    with pytest.raises(BadRequest):
        of(x_claude_code_session_id=half, x_claude_code_agent_id=half)
    for wrong in ("é", "a\tb", "x" * (limits.SESSION_CHARS + 1)):
        with pytest.raises(BadRequest):
            of(x_session_id=wrong)
