"""Asks the region owner how far it is: one request, one reply over its socket, for progress and `status` alone.

Not here: descriptors (lanes attach by themselves). Invariant: what arrives is bounded and of the expected types, or it
counts as no answer.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import msgpack

_TIMEOUT_S = 0.5
_MESSAGE_MAX_BYTES = 1024
OWNER_STATES = ("starting", "adopting", "filling", "ready")
_SOURCES = ("", "built", "adopted")


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """How far the region is."""

    state: str  # one of OWNER_STATES
    done_bytes: int
    total_bytes: int
    source: str = ""  # built | adopted, once ready
    fingerprint: bytes = b""  # 32 bytes
    generation: bytes = b""  # 16 bytes, all zero until ready

    def __str__(self) -> str:
        if self.state in ("filling", "adopting") and self.total_bytes:
            return f"{self.state} {100 * self.done_bytes // self.total_bytes} %"
        return self.state


def ask_owner(path: Path, timeout_s: float = _TIMEOUT_S) -> OwnerStatus | None:
    """Its status, None when nobody answers in time. Blocks that long: call it in a thread."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.send(msgpack.packb({"v": 1, "want": "status"}))
            raw = msgpack.unpackb(connection.recv(_MESSAGE_MAX_BYTES), max_map_len=16, max_array_len=0)
    except (OSError, ValueError, msgpack.UnpackException):
        return None
    if not isinstance(raw, dict):
        return None
    state, done, total, source = (raw.get(key) for key in ("state", "done", "total", "source"))
    fingerprint, generation = raw.get("fingerprint"), raw.get("generation")
    if not isinstance(state, str) or state not in OWNER_STATES or not isinstance(source, str) or source not in _SOURCES:
        return None
    if not isinstance(done, int) or not isinstance(total, int) or not 0 <= done <= total:
        return None
    if not _is_key(fingerprint, 32) or not _is_key(generation, 16):
        return None
    return OwnerStatus(state, done, total, source, fingerprint, generation)


def _is_key(value: object, size_bytes: int) -> TypeGuard[bytes]:
    return isinstance(value, bytes) and len(value) == size_bytes
