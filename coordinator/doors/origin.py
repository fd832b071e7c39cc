"""Which names of this host a request may use: against web pages whose name was pointed here (DNS rebinding).

Not here: keys. Invariant: a request from a browser passes only when its Host, and its Origin if there is one, are names
of this host.
"""

from __future__ import annotations

import re

_HOST = re.compile(r"(\[(?P<v6>[0-9A-Fa-f:]+)\]|(?P<name>[A-Za-z0-9.-]+))(:[0-9]{1,5})?")
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(header: str) -> str | None:
    """The name in a Host header, without its port: a forwarded door has another port there than here."""
    found = _HOST.fullmatch(header)
    return found and (found["v6"] or found["name"]).lower()


def is_local(host: str | None, origin: str | None, names: frozenset[str]) -> bool:
    """Whether both are names of this host. A program may send neither; a browser always names a host."""
    if host is not None and host_name(host) not in names:
        return False
    if origin is None:
        return True
    scheme, found, name = origin.partition("://")
    return bool(found) and scheme in ("http", "https") and host_name(name) in names
