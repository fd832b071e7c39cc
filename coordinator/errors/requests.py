"""Errors that are the client's mistake. The tree is drawn in the package. Invariant: none is retryable."""

from coordinator.errors.base import CoordinatorError


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
