"""The errors of the coordinator, drawn, with what each door answers:

    CoordinatorError                 code                      retryable  HTTP  gRPC
    ├── RequestError                                                            the client's mistake; names the field
    │   ├── BadRequest               invalid_request           no         400   INVALID_ARGUMENT
    │   ├── Unsupported              unsupported               no         400   INVALID_ARGUMENT
    │   ├── OutOfRange               out_of_range              no         400   INVALID_ARGUMENT
    │   ├── EmptyPrompt              empty_prompt              no         400   INVALID_ARGUMENT
    │   ├── TokenOutOfRange          token_out_of_range        no         400   INVALID_ARGUMENT
    │   ├── ContextLengthExceeded    context_length_exceeded   no         400   INVALID_ARGUMENT
    │   ├── TokenizerMissing         tokenizer_missing         no         400   FAILED_PRECONDITION
    │   ├── Unauthorized             unauthorized              no         401   UNAUTHENTICATED
    │   ├── Forbidden                forbidden                 no         403   PERMISSION_DENIED
    │   ├── ModelNotFound            model_not_found           no         404   NOT_FOUND
    │   ├── RouteNotFound            not_found                 no         404   UNIMPLEMENTED
    │   ├── MethodNotAllowed         method_not_allowed        no         405   UNIMPLEMENTED
    │   ├── BodyTimeout              body_timeout              no         408   DEADLINE_EXCEEDED
    │   ├── BodyTooLarge             body_too_large            no         413   INVALID_ARGUMENT
    │   └── MediaType                unsupported_media_type    no         415   INVALID_ARGUMENT
    ├── Refused                                                                 not now; nothing was computed
    │   ├── QueueFull                queue_full                yes        429   RESOURCE_EXHAUSTED
    │   ├── RateLimited              rate_limited              yes        429   RESOURCE_EXHAUSTED
    │   ├── TenantBusy               tenant_busy               yes        429   RESOURCE_EXHAUSTED
    │   ├── NoLane                   no_lane                   yes        503   UNAVAILABLE
    │   └── Closing                  closing                   yes        503   UNAVAILABLE
    ├── LaneError                                                               a lane did not do its part
    │   ├── LaneBusy                 lane_busy                 yes        503   UNAVAILABLE
    │   ├── LaneLost                 lane_lost                 yes        503   UNAVAILABLE
    │   ├── LaneTimeout              lane_timeout              yes        504   DEADLINE_EXCEEDED
    │   ├── LaneRejected             lane_rejected             no         500   INTERNAL
    │   └── LaneFailed               lane_failed               no         500   INTERNAL
    ├── DeadlineExceeded         deadline_exceeded         no         504   DEADLINE_EXCEEDED
    ├── Gone                                                                    the client left or stopped reading
    │   ├── Cancelled                cancelled                 no         499   CANCELLED
    │   └── SlowReader               slow_reader               no         499   ABORTED
    ├── SetupError                                                              the coordinator cannot start
    │   ├── BadAddress               bad_address               no         500   INTERNAL
    │   ├── BadTokenizer             bad_tokenizer             no         500   INTERNAL
    │   ├── BadOption                bad_option                no         500   INTERNAL
    │   ├── BadPack                  bad_pack                  no         500   INTERNAL
    │   ├── BadTenants               bad_tenants               no         500   INTERNAL
    │   ├── LauncherError            launcher                  no         500   INTERNAL
    │   ├── StartFailed              start_failed              no         500   INTERNAL
    │   └── RunDirError              run_dir                   no         500   INTERNAL
    │       └── RunDirBusy           run_dir_busy              yes        500   INTERNAL
    ├── OperationError                                                          what an operator asked of a lane
    │   ├── LaneNotFound             lane_not_found            no         404   NOT_FOUND
    │   └── OperationFailed          operation_failed          no         500   FAILED_PRECONDITION
    ├── Interrupted              interrupted               no         500   INTERNAL
    └── InternalError                internal                  no         500   INTERNAL

The classes carry the table; a test compares them with the drawing. Messages are for the client: no path, no address
(a `SetupError`'s is for the operator and names both). gRPC codes are names: pure code may import this file.
"""

from typing import ClassVar


class CoordinatorError(Exception):
    """Base of every error this package raises on purpose."""

    code: ClassVar[str] = "coordinator"
    retryable: ClassVar[bool] = False
    http: ClassVar[int] = 500
    grpc: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param
        self.retry_after_s = retry_after_s  # when there may be room; None: nobody knows


class RequestError(CoordinatorError):
    """The client's mistake; `param` names the field."""

    code = "request"
    http = 400
    grpc = "INVALID_ARGUMENT"


class BadRequest(RequestError):
    """Malformed: not JSON, a missing field, a wrong type."""

    code = "invalid_request"


class Unsupported(RequestError):
    """A field that would change the meaning of the answer and is not supported."""

    code = "unsupported"


class OutOfRange(RequestError):
    """A number or a length outside its limits."""

    code = "out_of_range"


class EmptyPrompt(RequestError):
    """A prompt of no tokens."""

    code = "empty_prompt"


class TokenOutOfRange(RequestError):
    """A token id that the model does not have."""

    code = "token_out_of_range"


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for an answer (`context_limit` has the words)."""

    code = "context_length_exceeded"


class TokenizerMissing(RequestError):
    """Text was sent to a model packed without a tokenizer."""

    code = "tokenizer_missing"
    grpc = "FAILED_PRECONDITION"


class Unauthorized(RequestError):
    """No key, or none that counts."""

    code = "unauthorized"
    http = 401
    grpc = "UNAUTHENTICATED"


class Forbidden(RequestError):
    """A web page of another host asks."""

    code = "forbidden"
    http = 403
    grpc = "PERMISSION_DENIED"


class ModelNotFound(RequestError):
    """Another model than the one served."""

    code = "model_not_found"
    http = 404
    grpc = "NOT_FOUND"


class RouteNotFound(RequestError):
    """No such path."""

    code = "not_found"
    http = 404
    grpc = "UNIMPLEMENTED"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http = 405
    grpc = "UNIMPLEMENTED"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    code = "body_timeout"
    http = 408
    grpc = "DEADLINE_EXCEEDED"


class BodyTooLarge(RequestError):
    """The body is over its limit."""

    code = "body_too_large"
    http = 413


class MediaType(RequestError):
    """The body is not plain JSON."""

    code = "unsupported_media_type"
    http = 415


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


class SetupError(CoordinatorError):
    """The coordinator cannot start; the message is for the operator."""

    code = "setup"


class BadAddress(SetupError):
    """An address to listen on that cannot be parsed, is taken or is not local."""

    code = "bad_address"


class BadTokenizer(SetupError):
    """The pack's tokenizer cannot be used."""

    code = "bad_tokenizer"


class BadOption(SetupError):
    """An option has a value that cannot work on this host."""

    code = "bad_option"


class BadPack(SetupError):
    """What was named is no pack."""

    code = "bad_pack"


class BadTenants(SetupError):
    """The file of tenants cannot be used."""

    code = "bad_tenants"


class LauncherError(SetupError):
    """Processes cannot be started on this host in the way that was asked for."""

    code = "launcher"


class StartFailed(SetupError):
    """A process ended, or was not ready in time, while the cluster came up; carries the process's own words."""

    code = "start_failed"


class RunDirError(SetupError):
    """The run directory cannot be used, or there is none."""

    code = "run_dir"


class RunDirBusy(RunDirError):
    """Another live supervisor holds the run directory."""

    code = "run_dir_busy"
    retryable = True


class OperationError(CoordinatorError):
    """What an operator asked of a lane could not be done."""

    code = "operation"


class LaneNotFound(OperationError):
    """No lane has that name."""

    code = "lane_not_found"
    http = 404
    grpc = "NOT_FOUND"


class OperationFailed(OperationError):
    """It could not be done; the message says why, and what was left as it was."""

    code = "operation_failed"
    grpc = "FAILED_PRECONDITION"


class Interrupted(CoordinatorError):
    """A command was told to stop before it was done."""

    code = "interrupted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class InternalError(CoordinatorError):
    """A bug; the message says nothing, the log does."""

    code = "internal"
