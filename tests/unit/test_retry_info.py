"""The status that tells when to come again, read by a decoder of its own."""

from __future__ import annotations

import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.internal.decoder import _DecodeVarint

from coordinator.doors.retry_info import TYPE_URL, retry_info


def fields(data: bytes) -> dict[int, bytes | int]:
    found: dict[int, bytes | int] = {}
    at = 0
    while at < len(data):
        tag, at = _DecodeVarint(data, at)
        value, at = _DecodeVarint(data, at)
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        found[tag >> 3] = value
    return found


@pytest.mark.parametrize("message", ["", "x", "ü" * 63, "x" * 127, "x" * 128, "x" * 70_000])
def test_code_message_and_delay(message: str) -> None:
    status = fields(retry_info(8, message, 2.5))
    assert (status[1], status[2]) == (8, message.encode())
    packed = any_pb2.Any.FromString(status[3])
    assert packed.type_url == TYPE_URL
    delay = duration_pb2.Duration.FromString(fields(packed.value)[1])
    assert (delay.seconds, delay.nanos) == (2, 500_000_000)
