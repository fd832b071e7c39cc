"""Starts a gRPC server so that the start may be cancelled.

Not here: services and addresses. Invariant: `start_server` ends with a server that serves, or one that is stopped.
grpc.aio's own `start`, cancelled while it waits, leaves a task that fails later and prints a traceback.
"""

from __future__ import annotations

import asyncio

from grpc import aio


async def start_server(server: aio.Server) -> None:
    """Start it; when cancelled meanwhile, stop it again."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        await server.stop(None)
        raise
