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
    ├── AnswerCut                answer_cut                yes        502   UNAVAILABLE
    ├── SetupError                                                              the coordinator cannot start
    │   ├── BadAddress               bad_address               no         500   INTERNAL
    │   ├── BadTokenizer             bad_tokenizer             no         500   INTERNAL
    │   ├── BadOption                bad_option                no         500   INTERNAL
    │   ├── BadPack                  bad_pack                  no         500   INTERNAL
    │   ├── BadIdentity              bad_identity              no         500   INTERNAL
    │   ├── BadTenants               bad_tenants               no         500   INTERNAL
    │   ├── LauncherError            launcher                  no         500   INTERNAL
    │   ├── StartFailed              start_failed              no         500   INTERNAL
    │   └── RunDirError              run_dir                   no         500   INTERNAL
    │       └── RunDirBusy           run_dir_busy              yes        500   INTERNAL
    ├── OperationError                                                          what an operator asked of a lane
    │   ├── LaneNotFound             lane_not_found            no         404   NOT_FOUND
    │   ├── HostTaken                host_taken                yes        409   ALREADY_EXISTS
    │   └── OperationFailed          operation_failed          no         500   FAILED_PRECONDITION
    ├── Interrupted              interrupted               no         500   INTERNAL
    └── InternalError                internal                  no         500   INTERNAL

The classes carry the table; a test compares them with the drawing. Messages are for the client: no path, no address
(a `SetupError`'s is for the operator and names both). gRPC codes are names: pure code may import this file.
"""

from coordinator.errors.base import (
    CoordinatorError,
    codes_of,
)
from coordinator.errors.operating import (
    BadAddress,
    BadIdentity,
    BadOption,
    BadPack,
    BadTenants,
    BadTokenizer,
    HostTaken,
    Interrupted,
    LaneNotFound,
    LauncherError,
    OperationError,
    OperationFailed,
    RunDirBusy,
    RunDirError,
    SetupError,
    StartFailed,
)
from coordinator.errors.requests import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    ContextLengthExceeded,
    EmptyPrompt,
    Forbidden,
    MediaType,
    MethodNotAllowed,
    ModelNotFound,
    OutOfRange,
    RequestError,
    RouteNotFound,
    TokenizerMissing,
    TokenOutOfRange,
    Unauthorized,
    Unsupported,
)
from coordinator.errors.running import (
    AnswerCut,
    Cancelled,
    Closing,
    DeadlineExceeded,
    Gone,
    InternalError,
    LaneBusy,
    LaneError,
    LaneFailed,
    LaneLost,
    LaneRejected,
    LaneTimeout,
    NoLane,
    QueueFull,
    RateLimited,
    Refused,
    SlowReader,
    TenantBusy,
)

__all__ = (
    "AnswerCut",
    "BadAddress",
    "BadIdentity",
    "BadOption",
    "BadPack",
    "BadRequest",
    "BadTenants",
    "BadTokenizer",
    "BodyTimeout",
    "BodyTooLarge",
    "Cancelled",
    "Closing",
    "ContextLengthExceeded",
    "CoordinatorError",
    "DeadlineExceeded",
    "EmptyPrompt",
    "Forbidden",
    "Gone",
    "HostTaken",
    "InternalError",
    "Interrupted",
    "LaneBusy",
    "LaneError",
    "LaneFailed",
    "LaneLost",
    "LaneNotFound",
    "LaneRejected",
    "LaneTimeout",
    "LauncherError",
    "MediaType",
    "MethodNotAllowed",
    "ModelNotFound",
    "NoLane",
    "OperationError",
    "OperationFailed",
    "OutOfRange",
    "QueueFull",
    "RateLimited",
    "Refused",
    "RequestError",
    "RouteNotFound",
    "RunDirBusy",
    "RunDirError",
    "SetupError",
    "SlowReader",
    "StartFailed",
    "TenantBusy",
    "TokenOutOfRange",
    "TokenizerMissing",
    "Unauthorized",
    "Unsupported",
    "codes_of",
)
