"""Who may ask for how much: the limits of a tenant, and the file that says which key is whose.

    {"tenants": [{"name": "ci", "priority": "batch", "requests_per_minute": 60, "tokens_per_minute": 200000,
                  "concurrency": 4, "queue_requests": 32, "weight": 1.0, "keys": ["sha256:<64 hex digits>", …]}, …]}

Everything but name and keys may be left out. Not here: where a key stands in a request (doors), counting (admission).
Invariants: a key is only kept and compared as its SHA-256; no two tenants share a name or a key; a file that others may
read or write is refused.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator import limits
from coordinator.errors import BadTenants

_KEY = re.compile(r"sha256:[0-9a-f]{64}")


class Priority(enum.IntEnum):
    """The class of a request; a lower number goes first."""

    INTERACTIVE = 0
    DEFAULT = 1
    BATCH = 2

    @property
    def label(self) -> str:
        """As files, headers and metrics say it."""
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> Priority | None:
        """The class of that label; None for any other word."""
        return next((each for each in cls if each.label == label), None)


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one tenant may ask for. None: no limit of its own."""

    name: str
    ceiling: Priority = Priority.DEFAULT  # the best class that its requests may have
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output
    concurrency: int | None = None  # waiting and running
    queue_requests: int = limits.QUEUE_TENANT_REQUESTS
    weight: float = 1.0  # its share of tokens while others want some, too

    @property
    def salt(self) -> bytes:
        """Lanes share state only between requests with the same one; it never changes, so what is parked is found."""
        return hashlib.sha256(b"expressway tenant " + self.name.encode()).digest()


# Without a file nobody is told apart: one tenant, which has the whole queue to itself.
ANYONE = Tenant("anyone", ceiling=Priority.INTERACTIVE, queue_requests=limits.QUEUE_REQUESTS)

_Count = Annotated[int, Field(ge=1, le=1 << 40)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    keys: Annotated[list[str], Field(max_length=limits.TENANT_KEYS)] = []
    priority: Literal["interactive", "default", "batch"] = "default"
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrency: _Count | None = None
    queue_requests: Annotated[int, Field(ge=1, le=limits.QUEUE_REQUESTS)] = limits.QUEUE_TENANT_REQUESTS
    weight: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0

    def tenant(self) -> Tenant:
        return Tenant(
            self.name,
            Priority[self.priority.upper()],
            self.requests_per_minute,
            self.tokens_per_minute,
            self.concurrency,
            self.queue_requests,
            self.weight,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tenants: Annotated[list[_Entry], Field(max_length=limits.TENANTS)]


def hash_key(key: str) -> str:
    """How the file holds a key. Keys are long random strings, so one plain hash is enough."""
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Tenants:
    """The table: tenants by the hash of their keys."""

    _by_hash: Mapping[str, Tenant] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Tenants:
        """From the file's bytes. `BadTenants` says what is wrong and shows no key."""
        try:
            content = _File.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise BadTenants(f"tenants: {where}: {first['msg']}") from None
        by_hash: dict[str, Tenant] = {}
        names: set[str] = set()
        for entry in content.tenants:
            if entry.name in names:
                raise BadTenants(f"tenants: {entry.name!r} stands there twice")
            names.add(entry.name)
            tenant = entry.tenant()
            for key in entry.keys:
                if not _KEY.fullmatch(key):
                    raise BadTenants(f"tenants: {entry.name!r} has a key that is not sha256:<64 hex digits>")
                if key in by_hash:
                    raise BadTenants(f"tenants: {entry.name!r} has a key that stands there twice")
                by_hash[key] = tenant
        return cls(by_hash)

    @classmethod
    def load(cls, path: Path) -> Tenants:
        """From a file of this user that nobody else may read or write. `BadTenants` when there is none to be had."""
        try:
            with open(path, "rb", opener=_open) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise BadTenants(f"{path}: not a file")
                if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    raise BadTenants(f"{path}: belongs to another user or is open to others; chmod 600 it")
                data = file.read(limits.TENANTS_FILE_BYTES + 1)
        except OSError as error:
            raise BadTenants(f"{path}: {error.strerror}") from None
        if len(data) > limits.TENANTS_FILE_BYTES:
            raise BadTenants(f"{path}: over {limits.TENANTS_FILE_BYTES} bytes")
        return cls.parse(data)

    def of_key(self, key: str) -> Tenant | None:
        """Whose key this is. The look-up is by hash, so its time says nothing about other keys."""
        return self._by_hash.get(hash_key(key))


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
