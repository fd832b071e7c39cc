"""Errors of requests that were right: not now, a lost lane, too late, gone. The tree is drawn in the package.

Invariant: what is retryable is told to the client as such.
"""

from coordinator.errors.base import CoordinatorError


class Refused(CoordinatorError):
    """Not now: nothing was computed, try again."""

    code = "refused"
    retryable = True
    http = 503
    grpc = "UNAVAILABLE"


class QueueFull(Refused):
    """The queue is at its bound."""

    code = "queue_full"
    http = 429
    grpc = "RESOURCE_EXHAUSTED"


class RateLimited(Refused):
    """The tenant has had its requests or tokens of this minute."""

    code = "rate_limited"
    http = 429
    grpc = "RESOURCE_EXHAUSTED"


class TenantBusy(Refused):
    """The tenant has as many requests at once as it may."""

    code = "tenant_busy"
    http = 429
    grpc = "RESOURCE_EXHAUSTED"


class NoLane(Refused):
    """No lane serves, and none is on its way back."""

    code = "no_lane"


class Closing(Refused):
    """The coordinator is shutting down."""

    code = "closing"


class LaneError(CoordinatorError):
    """A lane did not do its part."""

    code = "lane"


class LaneBusy(LaneError):
    """The lane takes no new generation now."""

    code = "lane_busy"
    retryable = True
    http = 503
    grpc = "UNAVAILABLE"


class LaneLost(LaneError):
    """The lane, or the connection to it, went away."""

    code = "lane_lost"
    retryable = True
    http = 503
    grpc = "UNAVAILABLE"


class LaneTimeout(LaneError):
    """The lane did not answer in time."""

    code = "lane_timeout"
    retryable = True
    http = 504
    grpc = "DEADLINE_EXCEEDED"


class LaneRejected(LaneError):
    """The lane found the request wrong, though the coordinator had checked it."""

    code = "lane_rejected"


class LaneFailed(LaneError):
    """The lane began and reported an error."""

    code = "lane_failed"


class DeadlineExceeded(CoordinatorError):
    """The request's own time is over, wherever it was."""

    code = "deadline_exceeded"
    http = 504
    grpc = "DEADLINE_EXCEEDED"


class Gone(CoordinatorError):
    """The client left or stopped reading; nobody reads this answer."""

    code = "gone"
    http = 499
    grpc = "CANCELLED"


class Cancelled(Gone):
    """The client cancelled."""

    code = "cancelled"


class SlowReader(Gone):
    """The client stopped reading while its answer was being made."""

    code = "slow_reader"
    grpc = "ABORTED"


class AnswerCut(CoordinatorError):
    """The connection broke inside an answer, as when the server is killed. To whoever asked, not from a server.

    `tokens`: how many of it had arrived. Asked again it is another answer from its beginning, the same one where it is
    greedy or has a seed.
    """

    code = "answer_cut"
    retryable = True
    http = 502
    grpc = "UNAVAILABLE"

    def __init__(self, message: str, *, tokens: int) -> None:
        super().__init__(message)
        self.tokens = tokens


class InternalError(CoordinatorError):
    """A bug; the message says nothing, the log does."""

    code = "internal"
