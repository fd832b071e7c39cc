"""What is known of one request while it lives and when it has ended: times, counts and places, never its text.

Not here: who fills it in (stats.Timeline), who keeps it (journal). Times are seconds of the host's monotonic clock,
which lanes stamp tokens with as well. Invariant: written by one Timeline; everybody else only reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """One request."""

    id: str
    door: str  # "http", "grpc"
    tenant: str
    session: str  # as the client named it; empty when it named none
    prompt_tokens: int
    max_tokens: int
    queued_s: float
    stamps_ns: array[int] | None = None  # of its tokens, where somebody wants them
    stamps_limit: int = 0
    begun_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    replaced_choices: int | None = None  # of experts, while the prompt was read; None: it was read exactly
    trace_parent: str = ""  # of the client's own span, as W3C Trace Context writes it
    outcome: str = ""  # a finish reason or the code of an error, once ended
    lanes: list[tuple[str, int]] = field(default_factory=list)  # each with how many tokens there were when it began

    @property
    def lane(self) -> str:
        """The lane that has or had it last; empty while it waits for its first."""
        return self.lanes[-1][0] if self.lanes else ""

    def tokens_by_lane(self) -> Iterator[tuple[str, int]]:
        """Which lanes its tokens came from; a request that lost its lane has several."""
        ends = [*(begin for _, begin in self.lanes[1:]), self.tokens]
        for (lane, begin), end in zip(self.lanes, ends, strict=False):
            yield lane, end - begin
