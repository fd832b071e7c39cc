"""Certificates of hosts that count no longer: `revoked`, a file beside the head's identity, one a line.

    sha256:<64 hex digits> NAME          of the certificate's DER, as `openssl x509 -fingerprint -sha256` has it

The head looks at the file whenever a host says that it is there, so what `expressway cluster revoke` writes holds from
the next word on. Not here: who asks (doors.hosts). Invariants: without the file nobody is revoked; a file that cannot
be read, or has a line of another form, lets no host in.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from coordinator import limits
from coordinator.errors import BadIdentity

REVOKED = "revoked"
_LINE = re.compile(r"(sha256:[0-9a-f]{64})(?: [a-z0-9-]{1,31})?")


def fingerprint(certificate: bytes) -> str:
    """Of a certificate in DER."""
    return "sha256:" + hashlib.sha256(certificate).hexdigest()


class Revoked:
    """The list as it is now. `check` may be called once a second for every host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._found: frozenset[str] = frozenset()

    def check(self, certificate: bytes) -> None:
        """Raises BadIdentity for one that is on the list, or where the list cannot be read."""
        self._look()
        if fingerprint(certificate) in self._found:
            raise BadIdentity("the certificate of this host has been revoked")

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
            seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._found = _parse(file.read(limits.REVOKED_BYTES + 1))
                self._seen = seen
        except FileNotFoundError:
            self._seen, self._found = None, frozenset()
        except (OSError, ValueError):
            self._seen = None
            raise BadIdentity("the head cannot read which certificates were revoked") from None


def _parse(data: bytes) -> frozenset[str]:
    if len(data) > limits.REVOKED_BYTES:
        raise ValueError("too long")
    lines = [_LINE.fullmatch(line) for line in data.decode("ascii").splitlines()]
    found = frozenset(line[1] for line in lines if line)
    if not all(lines):
        raise ValueError("a line of another form")
    return found
