"""A wire between two hosts that can go dead: bytes pass, or nothing does and nobody is told, as with a cut cable."""

from __future__ import annotations

import asyncio
import contextlib

from coordinator.tasks import Tasks, first


class Wire:
    """Listens on `port` of loopback and passes bytes on to `target`. Use as an async context manager."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks = Tasks()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._arrived, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._tasks.cancel()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._pass(reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            await self._whole.wait()
            back, there = await asyncio.open_connection(*self._target)
            await first(self._copy(reader, there), self._copy(back, writer))
        except OSError:
            pass
        finally:
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            await self._whole.wait()  # an end does not get through either
