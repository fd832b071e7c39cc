"""Server-sent events on one HTTP response: data lines, keep-alive comments, a bounded patience with slow clients.

Not here: what is sent. Invariants: a client that takes nothing for `limits.WRITE_STALL_S` is cut off with `SlowReader`;
about `limits.STREAM_BUFFER_BYTES` wait for it on our side. Left to itself the kernel takes megabytes, whole answers: a
lane would write them to their end for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiohttp import web

from coordinator import limits
from coordinator.apis.writer import Event, dump
from coordinator.errors import SlowReader


class EventStream:
    """Begins its response with the first thing that is sent."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._headers = headers
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the status line is on its way: an error can no longer have its own."""
        return self._response is not None

    async def begin(self, **headers: str) -> web.StreamResponse:
        """The status line and headers, once."""
        if self._response is None:
            self._response = web.StreamResponse(headers={**self._headers, **headers})
            self._response.content_type = "text/event-stream"
            self._response.headers["Cache-Control"] = "no-store"
            self._bound_buffers()
            await self._response.prepare(self._request)
        return self._response

    async def send(self, event: Event) -> None:
        """One event."""
        name = f"event: {event.name}\n" if event.name else ""
        data = event.data if isinstance(event.data, str) else dump(event.data)
        await self._write(f"{name}data: {data}\n\n".encode())

    async def ping(self, event: Event | None) -> None:
        """Nothing, so that nobody in between takes the connection for dead."""
        if event is None:
            await self._write(b": keep-alive\n\n")
        else:
            await self.send(event)

    def _bound_buffers(self) -> None:
        transport = self._request.transport
        if transport is None:
            return  # the client is gone; the first write says so
        transport.set_write_buffer_limits(high=limits.STREAM_BUFFER_BYTES // 4)
        if (connection := transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.STREAM_BUFFER_BYTES)

    async def _write(self, data: bytes) -> None:
        response = await self.begin()
        try:
            async with asyncio.timeout(limits.WRITE_STALL_S):
                await response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise SlowReader("the client stopped reading") from None
