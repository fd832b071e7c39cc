"""Where an HTTP application listens: a loopback port or a Unix socket that is 0600 from its first moment.

Not here: applications. Invariant: a refused address is a BadAddress, and the umask is as before.
"""

from __future__ import annotations

import os
from dataclasses import replace

from aiohttp import web

from coordinator.config import Address
from coordinator.errors import BadAddress


async def listen_http(runner: web.AppRunner, address: Address) -> Address:
    """Listens; the address with the port that the kernel chose in place of 0."""
    await runner.setup()
    umask = os.umask(0o177)
    try:
        if address.path:
            await web.UnixSite(runner, address.path).start()
            return address
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        raise BadAddress(f"{address}: cannot listen there: {error.strerror}") from error
    finally:
        os.umask(umask)
    return replace(address, port=runner.addresses[-1][1])
