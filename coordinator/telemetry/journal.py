"""The requests that live now, and the last of those that have ended: what the page shows and traces keep.

Not here: how times get into a record (stats.Timeline), files (trace_writer), the page. Invariants: a record is in
`living` from its place in the queue until its client saw its end; what is kept of ended ones is bounded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coordinator import limits
from coordinator.request import Request
from coordinator.telemetry.request_record import RequestRecord
from coordinator.telemetry.stats import COMPLETE


@dataclass(frozen=True, slots=True)
class FirstToken:
    """When an answer's first token came, from which lane, and how long after the request was queued."""

    at_s: float
    lane: str
    seconds: float


class Journal:
    """One per coordinator. Each of `on_record` gets every ended record, with its tokens' stamps."""

    def __init__(self, *on_record: Callable[[RequestRecord], None]) -> None:
        self._on_record = on_record
        self.living: dict[str, RequestRecord] = {}  # by id, in order of arrival
        self.failures: deque[RequestRecord] = deque(maxlen=limits.PAGE_FAILURES)  # the latest last
        self._answered: dict[str, int] = {}  # tokens of ended requests, by lane
        self.first_tokens: deque[FirstToken] = deque(maxlen=limits.PAGE_FIRST_TOKENS)

    def record(self, request: Request, door: str, now: float, trace_parent: str = "") -> RequestRecord:
        """A new one, which is nowhere yet."""
        return RequestRecord(
            request.id,
            door,
            request.tenant.name,
            request.session or "",
            len(request.prompt_ids),
            request.max_tokens,
            now,
            stamps_ns=array("Q") if self._on_record else None,
            stamps_limit=limits.TRACE_STAMPS,
            trace_parent=trace_parent,
        )

    def opened(self, record: RequestRecord) -> None:
        """The request has a place in the queue."""
        if not record.outcome:
            self.living[record.id] = record

    def ended(self, record: RequestRecord) -> None:
        """Its client saw its end."""
        self.living.pop(record.id, None)
        _add(record, self._answered)
        if record.first_token_s is not None:
            first = record.lanes[0][0] if record.lanes else ""
            self.first_tokens.append(FirstToken(record.first_token_s, first, record.first_token_s - record.queued_s))
        if record.outcome not in (*COMPLETE, "cancelled"):
            self.failures.append(record)
        for take in self._on_record:
            take(record)

    def answered(self) -> dict[str, int]:
        """Tokens that came from each lane so far, those of living requests included."""
        totals = dict(self._answered)
        for record in self.living.values():
            _add(record, totals)
        return totals


def _add(record: RequestRecord, totals: dict[str, int]) -> None:
    for lane, tokens in record.tokens_by_lane():
        totals[lane] = totals.get(lane, 0) + tokens
