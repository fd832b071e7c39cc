"""Where an HTTP application listens: a loopback port or a Unix socket that is 0600 from its first moment.

Not here: applications. Invariant: a refused address is a BadAddress, and the umask is as before.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import http_exceptions, web

from coordinator.config import Address
from coordinator.errors import BadAddress

_BACKLOG = 1024  # connections that may arrive in one moment; one too many would come again a second later

_log = structlog.get_logger("http")


class ProtocolLog(logging.Logger):
    """Where aiohttp tells of broken connections. It quotes the bytes that it could not read, and a body that is longer
    than its length says is read as the next request: so of a client's mistake only the kind is kept."""  # fmt: skip

    def __init__(self) -> None:
        super().__init__("http", logging.WARNING)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        """An error outside of a handler."""
        if isinstance(exc_info, http_exceptions.HttpProcessingError):
            _log.info("malformed request", kind=type(exc_info).__name__)
        elif isinstance(exc_info, ConnectionError):
            _log.info("client gone", kind=type(exc_info).__name__)  # between two words of its answer
        else:
            _log.error("connection failed", exc_info=exc_info)


async def listen_http(runner: web.AppRunner, address: Address, tls: ssl.SSLContext | None = None) -> Address:
    """Listens; the address with the port that the kernel chose in place of 0."""
    await runner.setup()
    umask = os.umask(0o177)
    try:
        if address.path:
            await web.UnixSite(runner, address.path, backlog=_BACKLOG).start()
            return address
        await web.TCPSite(runner, address.host, address.port, ssl_context=tls, backlog=_BACKLOG).start()
    except OSError as error:
        raise BadAddress(f"{address}: cannot listen there: {error.strerror}") from error
    finally:
        os.umask(umask)
    return replace(address, port=runner.addresses[-1][1])
