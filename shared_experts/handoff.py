"""The words that pass a descriptor between processes of one host, as values and as bytes.

One connection carries one request and one reply, each one message of a SOCK_SEQPACKET Unix socket: a strict msgpack map
of at most 1 KiB. A reply that lends the region carries exactly one descriptor (SCM_RIGHTS); every other message none.
Not here: who serves (descriptor_server.py), whether a descriptor is the right region (region.check_descriptor).
Invariant: nothing that arrives is used before it is parsed whole, and a received descriptor that is not handed to the
caller is closed.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import cast

import msgpack

from shared_experts.errors import HandoffError, RegionError, RegionUnavailable

PROTOCOL_VERSION = 1
MESSAGE_MAX_BYTES = 1024
SOCKET_PATH_MAX_BYTES = 107  # sun_path less its closing zero
WANTS = ("descriptor", "status")
STATES = ("starting", "adopting", "filling", "ready")
SOURCES = ("", "built", "adopted")  # "" until the region is ready

_DESCRIPTORS_MAX = 4  # room to see that a peer sent too many; the kernel drops what does not fit
_REFUSAL_MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """How far the region of the process that answers is; a lane that lends its copy is always "ready"."""

    state: str
    source: str
    done_bytes: int
    total_bytes: int
    fingerprint: bytes  # 32 bytes
    generation: bytes  # 16 bytes, all zero until ready
    pid: int

    def __str__(self) -> str:
        share = f" {100 * self.done_bytes // self.total_bytes} %" if self.total_bytes else ""
        return f"{self.state}{'' if self.state == 'ready' else share} (process {self.pid})"


def encode_request(want: str) -> bytes:
    """The one request there is: `want` is one of WANTS."""
    assert want in WANTS
    return cast(bytes, msgpack.packb({"v": PROTOCOL_VERSION, "want": want}))


def decode_request(message: bytes) -> str:
    """What the peer wants; raises HandoffError on anything else."""
    fields = _fields(message, {"v": int, "want": str})
    if fields["v"] != PROTOCOL_VERSION or fields["want"] not in WANTS:
        raise HandoffError("not a request of this protocol")
    return str(fields["want"])


def encode_status(status: RegionStatus) -> bytes:
    """The reply's bytes; whether a descriptor goes with it is the caller's."""
    return cast(
        bytes,
        msgpack.packb({
            "v": PROTOCOL_VERSION, "state": status.state, "source": status.source, "done": status.done_bytes,
            "total": status.total_bytes, "fingerprint": status.fingerprint, "generation": status.generation,
            "pid": status.pid,
        }),
    )  # fmt: skip


def encode_refusal(reason: str) -> bytes:
    """The reply to a request that made no sense."""
    return cast(bytes, msgpack.packb({"v": PROTOCOL_VERSION, "refused": reason[:_REFUSAL_MAX_CHARS]}))


def decode_status(message: bytes) -> RegionStatus:
    """The peer's reply; raises HandoffError on a refusal and on anything malformed."""
    raw = _map(message)
    if set(raw) == {"v", "refused"} and type(raw["refused"]) is str:
        raise HandoffError(f"the peer refused: {raw['refused'][:_REFUSAL_MAX_CHARS]!r}")
    fields = _fields(
        message,
        {"v": int, "state": str, "source": str, "done": int, "total": int,
         "fingerprint": bytes, "generation": bytes, "pid": int},
    )  # fmt: skip
    status = RegionStatus(
        *(fields[k] for k in ("state", "source", "done", "total", "fingerprint", "generation", "pid"))  # type: ignore[arg-type]
    )
    if fields["v"] != PROTOCOL_VERSION:
        raise HandoffError(f"protocol version {fields['v']}, this program speaks {PROTOCOL_VERSION}")
    if (
        status.state not in STATES
        or status.source not in SOURCES
        or not 0 <= status.done_bytes <= status.total_bytes < 1 << 63
        or len(status.fingerprint) != 32
        or len(status.generation) != 16
        or not 0 < status.pid < 1 << 31
    ):
        raise HandoffError("a field of the reply is out of range")
    return status


def _map(message: bytes) -> dict[str, object]:
    if len(message) > MESSAGE_MAX_BYTES:
        raise HandoffError(f"a message of more than {MESSAGE_MAX_BYTES} bytes")
    try:
        raw = msgpack.unpackb(
            message, raw=False, strict_map_key=True, max_map_len=16, max_array_len=0, max_ext_len=0,
            max_str_len=MESSAGE_MAX_BYTES, max_bin_len=MESSAGE_MAX_BYTES,
        )  # fmt: skip
    except Exception as error:  # msgpack has no single base class: ValueError, UnpackException, UnicodeDecodeError, …
        raise HandoffError("a message that is not msgpack") from error
    if type(raw) is not dict or not all(type(k) is str for k in raw):
        raise HandoffError("a message that is not a map")
    return raw


def _fields(message: bytes, types: dict[str, type]) -> dict[str, object]:
    raw = _map(message)
    if set(raw) != set(types) or any(type(raw[k]) is not t for k, t in types.items()):  # bool is not int here
        raise HandoffError("a message with missing, extra or wrongly typed fields")
    return raw


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel recorded it when the connection was made."""
    return cast(int, struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def check_socket_path(path: str | os.PathLike[str]) -> str:
    """The path as the kernel can take it; raises RegionError when it is too long."""
    text = os.fspath(path)
    if len(os.fsencode(text)) > SOCKET_PATH_MAX_BYTES:
        raise RegionError(
            f"{text}: a socket's path has at most {SOCKET_PATH_MAX_BYTES} bytes; use a shorter run directory"
        )
    return text


def ask(path: str | os.PathLike[str], want: str, *, timeout_s: float) -> tuple[RegionStatus, int | None]:
    """One request to the process behind `path`: its status and, when it lends one, a descriptor that is now ours.

    Raises RegionUnavailable (nobody answers in time) or HandoffError (what answers is not to be trusted).
    """
    text = check_socket_path(path)
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, text, deadline_s)
            if peer_uid(connection) != os.geteuid():
                raise HandoffError(f"{text}: another user's process listens here")
            connection.send(encode_request(want))
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            message, fds = receive(connection)
        except OSError as error:
            raise RegionUnavailable(f"{text}: {error.strerror or error}") from error
    try:
        if not message:
            raise RegionUnavailable(f"{text}: the peer closed the connection")
        status = decode_status(message)
        if len(fds) != (1 if want == "descriptor" and status.state == "ready" else 0):
            raise HandoffError(
                f"{text}: {len(fds)} descriptors came with a reply to {want!r} in state {status.state!r}"
            )
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return status, fds[0] if fds else None


def _connect(connection: socket.socket, path: str, deadline_s: float) -> None:
    """Connects; a queue that is full at the moment (EAGAIN, which the kernel does not wait for) is tried again."""
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.005)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message of this protocol and the descriptors that came with it, which are the caller's to close."""
    return receive_message(connection, MESSAGE_MAX_BYTES)


def receive_message(connection: socket.socket, most_bytes: int) -> tuple[bytes, list[int]]:
    """One message and its descriptors; raises HandoffError for more of either than was expected."""
    space = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
    message, ancillary, flags, _ = connection.recvmsg(most_bytes, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            held = array.array("i")
            held.frombytes(data[: len(data) - len(data) % held.itemsize])
            fds.extend(held)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise HandoffError("a message with more bytes or descriptors than the protocol has")
    return message, fds
