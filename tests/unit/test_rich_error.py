"""Errors in gRPC's rich form, read back with the library that clients have for it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coordinator import limits
from coordinator.doors.rich_error import DETAILS_KEY, RETRY_AFTER_KEY, trailing
from coordinator.errors import AnswerCut, CoordinatorError, Interrupted, OutOfRange, QueueFull


def kinds(kind: type[CoordinatorError] = CoordinatorError) -> Iterator[type[CoordinatorError]]:
    for below in kind.__subclasses__():
        if below.__module__.startswith("coordinator.errors.") and below not in (Interrupted, AnswerCut):
            yield below
        yield from kinds(below)


def rich_status(error: CoordinatorError) -> status_pb2.Status:
    """As it arrives."""
    return status_pb2.Status.FromString(bytes(dict(trailing(error))[DETAILS_KEY]))  # type: ignore[arg-type]


def details(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
        for detail in status.details:
            message = kind()
            if detail.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


@pytest.mark.parametrize("kind", list(kinds()))
def test_every_error_says_its_code_and_whether_to_come_again(kind: type[CoordinatorError]) -> None:
    status = rich_status(kind("Zürich", param="x", retry_after_s=2.5))
    assert rpc_status.code_to_grpc_status_code(status.code) is grpc.StatusCode[kind.grpc]
    found = details(status)
    info = found["ErrorInfo"]
    assert (info.reason, info.domain) == (kind.code, "expressway")  # type: ignore[attr-defined]
    assert [each.field for each in found["BadRequest"].field_violations] == ["x"]  # type: ignore[attr-defined]
    assert ("RetryInfo" in found) is kind.retryable
    if kind.retryable:
        assert found["RetryInfo"].retry_delay.ToMilliseconds() == 2500  # type: ignore[attr-defined]


def test_beside_it_stand_plain_words_for_clients_without_a_library() -> None:
    plain = dict(trailing(QueueFull("full")))
    assert (plain["expressway-error-code"], plain[RETRY_AFTER_KEY]) == ("queue_full", f"{limits.RETRY_AFTER_S:g}")
    assert status_pb2.Status.FromString(bytes(plain[DETAILS_KEY])).message == "full"  # type: ignore[arg-type]
    assert RETRY_AFTER_KEY not in dict(trailing(OutOfRange("wrong", param="top_k")))
    assert rich_status(OutOfRange("wrong", param="top_k")).message == "wrong (field top_k)"
