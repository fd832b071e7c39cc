"""Who asks, as the head of a request says it: sessions that agents name anyway, priority, patience.

    session          x-session-id | x-session-affinity | session-id | x-claude-code-session-id, the first that is there
    of a subagent    x-claude-code-agent-id: a session of its own, whose parent is the session above
    parent           x-parent-session-id | x-claude-code-parent-agent-id
    priority         x-priority: interactive | default | batch
    patience         x-request-timeout-s
    trace            traceparent (W3C Trace Context); one that is malformed is none, as that standard wants it

Not here: keys (auth), what is done with it (request, queue). Invariant: every id is printable ASCII and bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from coordinator.errors import OutOfRange
from coordinator.request import check_session
from coordinator.serving import Caller
from coordinator.tenants import ANYONE, Priority, Tenant

SESSION_HEADERS = ("x-session-id", "x-session-affinity", "session-id", "x-claude-code-session-id")
PARENT_HEADER = "x-parent-session-id"
AGENT_HEADER = "x-claude-code-agent-id"
PARENT_AGENT_HEADER = "x-claude-code-parent-agent-id"
PRIORITY_HEADER = "x-priority"
TIMEOUT_HEADER = "x-request-timeout-s"
TRACE_HEADER = "traceparent"

_TRACE_PARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def parse_caller(headers: Mapping[str, str], request_id: str, tenant: Tenant = ANYONE) -> Caller:
    """From HTTP headers or gRPC metadata; names are looked up in lower case."""
    name = next((name for name in SESSION_HEADERS if headers.get(name)), SESSION_HEADERS[0])
    session = check_session(headers.get(name), name)
    parent = check_session(headers.get(PARENT_HEADER), PARENT_HEADER)
    agent = check_session(headers.get(AGENT_HEADER), AGENT_HEADER)
    if session and agent:
        above = check_session(headers.get(PARENT_AGENT_HEADER), PARENT_AGENT_HEADER)
        parent = parent or (_joined(session, above) if above else session)
        session = _joined(session, agent)
    return Caller(request_id, tenant, session, parent, _priority(headers), _timeout(headers), _trace(headers))


def _joined(session: str, agent: str) -> str | None:
    return check_session(f"{session}/{agent}", AGENT_HEADER)


def _priority(headers: Mapping[str, str]) -> Priority:
    word = headers.get(PRIORITY_HEADER)
    found = Priority.DEFAULT if not word else Priority.named(word)
    if found is None:
        words = ", ".join(each.label for each in Priority)
        raise OutOfRange(f"{PRIORITY_HEADER} is one of {words}", param=PRIORITY_HEADER)
    return found


def _trace(headers: Mapping[str, str]) -> str:
    found = headers.get(TRACE_HEADER, "")
    return found if _TRACE_PARENT.fullmatch(found) else ""


def _timeout(headers: Mapping[str, str]) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds <= 0:
        raise OutOfRange(f"{TIMEOUT_HEADER} is a number of seconds over 0", param=TIMEOUT_HEADER)
    return seconds
