"""Which experts a lane used, kept from one start to the next, so that a cache does not begin empty.

One file per lane and pack, in the cluster's state directory; a start takes the mean of all lanes' files of its pack.

    header, 80 bytes    magic "EXPRPROF", version u32, layers u32, experts u32, 0 u32, pack fingerprint [32],
                        xxh3-128 of the body [16], 0 u64
    body                fp32 [layers, experts]: expected uses, 0 .. MOST_USES

All little-endian. Never in it: tokens, prompts, times. Not here: what the values mean (adaptive), when one is written.

Invariant: a file is whole or it is not there (temporary name, then rename), and it belongs to this user. What is not
exactly such a file is passed over with a line in the log: a profile is a hint, and never a reason not to start.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from lanes.limits import MAX_PROFILES

_log = structlog.get_logger(__name__)

_MAGIC, _VERSION = b"EXPRPROF", 1
_HEADER = struct.Struct("<8sIIII32s16sQ")
_NAME = re.compile(r"[0-9a-f]{16}-[a-z0-9][a-z0-9-]{0,31}\.profile")
MOST_USES = 1e6

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PackExperts:
    """Whose profile it is."""

    fingerprint: bytes  # 32, of the pack
    layers: int
    experts: int

    @property
    def keys(self) -> int:
        """Of all layers."""
        return self.layers * self.experts


def write(folder: Path, lane: str, of: PackExperts, values: npt.NDArray[np.floating]) -> None:
    """Replaces the lane's file; values [layers * experts]. An error is logged, not raised."""
    body = np.clip(values, 0, MOST_USES).astype("<f4").tobytes()
    digest = xxhash.xxh3_128_digest(body)
    data = _HEADER.pack(_MAGIC, _VERSION, of.layers, of.experts, 0, of.fingerprint, digest, 0) + body
    path = folder / f"{of.fingerprint.hex()[:16]}-{lane}.profile"
    temporary = path.with_suffix(f".{os.getpid()}.new")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as to:
            to.write(data)
            to.flush()
            os.fsync(file)
        temporary.rename(path)
    except OSError as error:
        _log.warning("expert_profile_not_written", reason=error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink()


def read(folder: Path, of: PackExperts) -> Values | None:
    """The mean of the pack's files, [layers * experts]; None where there is none that may be believed."""
    prefix = of.fingerprint.hex()[:16]
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(prefix) and _NAME.fullmatch(name))
    except OSError:
        return None
    total, count = np.zeros(of.keys, np.float64), 0
    for name in names[:MAX_PROFILES]:
        try:
            total += _one(folder / name, of)
            count += 1
        except (OSError, ValueError) as error:
            _log.warning("expert_profile_refused", name=name, reason=str(error))
    return (total / count).astype(np.float32) if count else None


def _one(path: Path, of: PackExperts) -> Values:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, "rb") as source:
        found = os.fstat(file)
        size = _HEADER.size + 4 * of.keys
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise ValueError("it is no file of this user")
        if found.st_size != size:
            raise ValueError(f"it has {found.st_size} bytes, not {size}")
        data = source.read(size)
    if len(data) != size:
        raise ValueError("it was cut short")
    magic, version, layers, experts, zero, fingerprint, digest, last = _HEADER.unpack_from(data)
    if (magic, version, zero, last) != (_MAGIC, _VERSION, 0, 0):
        raise ValueError("it is no profile of a version that this program reads")
    if (layers, experts, fingerprint) != (of.layers, of.experts, of.fingerprint):
        raise ValueError("it is another pack's")
    body = data[_HEADER.size :]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ValueError("it is damaged")
    values = np.frombuffer(body, "<f4")
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= MOST_USES):
        raise ValueError("its values are out of range")
    return values
