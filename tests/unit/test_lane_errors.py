import grpc

from lanes import errors
from lanes.errors import LaneError, grpc_status


def tree(kind=LaneError):
    return [kind, *(found for child in kind.__subclasses__() for found in tree(child))]


def test_codes_are_unique_and_every_error_is_in_the_drawing():
    codes = [kind.code for kind in tree()]
    assert len(set(codes)) == len(codes)
    drawn = {line.replace("│", " ").replace("├── ", " ").replace("└── ", " ").split()[0]
             for line in errors.__doc__.splitlines() if line.startswith("    ")}  # fmt: skip
    assert {kind.__name__ for kind in tree()} <= drawn


def test_statuses():
    expected = {
        "empty_prompt": grpc.StatusCode.INVALID_ARGUMENT,
        "context_length_exceeded": grpc.StatusCode.INVALID_ARGUMENT,
        "bad_request": grpc.StatusCode.INVALID_ARGUMENT,
        "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "slow_reader": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "draining": grpc.StatusCode.UNAVAILABLE,
        "bad_protocol_version": grpc.StatusCode.FAILED_PRECONDITION,
        "non_finite_logits": grpc.StatusCode.INTERNAL,
        "engine_failed": grpc.StatusCode.INTERNAL,
    }
    found = {kind.code: grpc_status(kind("x")) for kind in tree()}
    assert expected.items() <= found.items()
    request_errors = tree(errors.RequestError)
    assert all(not kind.retryable and found[kind.code].name == "INVALID_ARGUMENT" for kind in request_errors)
