"""An error as gRPC's rich error model has it: a google.rpc.Status in the trailing metadata, for any client's library.

    ErrorInfo    reason: the stable code; domain: "expressway"
    BadRequest   the field that is to blame, where one is
    RetryInfo    when to come again, where that may help

Beside it stand the plain `expressway-error-code` and `retry-after`, for clients without such a library.

Not here: which errors there are (errors). Invariant: every error that the doors abort a call with goes through here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from coordinator import limits
from coordinator.errors import CoordinatorError
from coordinator.fleet.lane_client import ERROR_CODE_KEY

DETAILS_KEY = "grpc-status-details-bin"
RETRY_AFTER_KEY = "retry-after"
DOMAIN = "expressway"

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


def trailing(error: CoordinatorError) -> Metadata:
    """What ends the call beside its status."""
    found: list[tuple[str, str | bytes]] = [(ERROR_CODE_KEY, error.code)]
    wait_s = _wait_s(error) if error.retryable else None
    if wait_s is not None:
        found.append((RETRY_AFTER_KEY, f"{wait_s:g}"))
    found.append((DETAILS_KEY, _status(error.grpc, error.code, error.message, error.param, wait_s)))
    return tuple(found)


async def abort(context: grpc.aio.ServicerContext, error: CoordinatorError) -> NoReturn:
    """Ends the call with the error."""
    words = _words(error.message, error.param)
    await context.abort(grpc.StatusCode[error.grpc], words, trailing_metadata=trailing(error))
    raise AssertionError("abort always raises")


@functools.lru_cache(maxsize=64)  # under overload the same refusal is said again and again; it takes 40 µs to make
def _status(grpc_name: str, code: str, message: str, param: str | None, wait_s: float | None) -> bytes:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=code, domain=DOMAIN)]
    if param:
        violation = error_details_pb2.BadRequest.FieldViolation(field=param, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if wait_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(wait_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = grpc.StatusCode[grpc_name].value[0]
    status = status_pb2.Status(code=number, message=_words(message, param), details=_packed(details))
    return bytes(status.SerializeToString())


def _words(message: str, param: str | None) -> str:
    return f"{message} (field {param})" if param else message


def _wait_s(error: CoordinatorError) -> float:
    return error.retry_after_s or limits.RETRY_AFTER_S


def _packed(details: Sequence[Message]) -> list[any_pb2.Any]:
    packed = [any_pb2.Any() for _ in details]
    for place, detail in zip(packed, details, strict=True):
        place.Pack(detail)
    return packed
