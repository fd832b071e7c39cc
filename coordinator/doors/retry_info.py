"""When a refused gRPC client should come again, in the standard form: google.rpc.Status with a google.rpc.RetryInfo.

    Status  { 1: code, 2: message, 3: Any { RetryInfo { 1: Duration } } }        key: grpc-status-details-bin

Written out here because the package with these two messages brings some hundred others. Invariant: what any
client's own library of rich errors reads.
"""

from __future__ import annotations

from google.protobuf import any_pb2, duration_pb2

DETAILS_KEY = "grpc-status-details-bin"
TYPE_URL = "type.googleapis.com/google.rpc.RetryInfo"


def retry_info(code: int, message: str, retry_after_s: float) -> bytes:
    """The status as bytes; `code` is gRPC's number."""
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    packed = any_pb2.Any(type_url=TYPE_URL, value=_field(1, delay.SerializeToString()))
    return bytes([1 << 3, code]) + _field(2, message.encode()) + _field(3, packed.SerializeToString())


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes: tag, length, content."""
    length, rest = bytearray(), len(content)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes([number << 3 | 2, *length, rest]) + content
