"""Whose request this is: keys, and the file they stand in, as it is now.

Without a file nobody is told apart, and the doors listen on this host only. With one, every request needs a key of it.
The file is looked at with every request, so `expressway keys revoke` holds from the next one on.

Not here: where a key stands in a request (doors), quotas (admission). Invariants: once there was a file, no request is
let in without a key of it, whatever becomes of the file; a key is compared by its SHA-256 alone, and never logged.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from coordinator.errors import BadTenants, Unauthorized
from coordinator.tenants import ANYONE, Tenant, Tenants

_log = structlog.get_logger("auth")
_BEARER = "bearer "


class Auth:
    """One per coordinator. `BadTenants` when there is a file that cannot be used."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None  # what identifies the file that was read
        self._tenants: Tenants | None = None
        if path is not None and path.exists():
            self._seen = _identity(path)
            self._tenants = Tenants.load(path)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        self._look()
        return self._tenants is not None

    def tenant(self, authorization: str | None, api_key: str | None) -> Tenant:
        """Of the key in one of the two headers. `Unauthorized` when there is none that counts."""
        self._look()
        if self._tenants is None:
            return ANYONE
        key = api_key or ""
        if authorization and authorization.lower().startswith(_BEARER):
            key = authorization[len(_BEARER) :].strip()
        found = self._tenants.of_key(key) if key else None
        if found is None:
            raise Unauthorized("a valid key is required: Authorization: Bearer KEY, or x-api-key: KEY")
        return found

    def _look(self) -> None:
        if self._path is None:
            return
        found = _identity(self._path)
        if found == self._seen:
            return
        self._seen = found
        if found is None and self._tenants is None:
            return
        try:
            self._tenants = Tenants.load(self._path)
            _log.info("keys read again")
        except BadTenants as error:  # nobody is let in by a file that is broken or gone
            self._tenants = Tenants()
            _log.error("no key counts", reason=error.message)


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode
