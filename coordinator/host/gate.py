"""The one port of a host that joined: TLS from the coordinator goes on to a socket of the run directory.

    coordinator ── TCP, mutual TLS, "lane-0.NAME.expressway.internal" ──▶ gate ── bytes ──▶ lane-0.sock
                                    "supervisor.NAME. …"              ──▶      ── bytes ──▶ supervisor.sock

The name that the caller asks for in the handshake says which socket. Lanes and supervisor stay behind their Unix
sockets and see no network. Not here: gRPC, whose bytes pass unread. Invariants: only the holder of the head's
certificate gets a byte through, and only to the supervisor and lanes; a side that does not read stops the other one,
with at most one buffer of bytes between; a peer that is silent for GATE_SILENT_S in TCP is cut off, so that its lanes
notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import weakref
from pathlib import Path

import structlog

from coordinator import limits
from coordinator.config import Address
from coordinator.errors import BadAddress
from coordinator.host.identity import HEAD, Identity, process_name
from coordinator.tasks import Tasks, first

_PROCESS = re.compile(r"supervisor|lane-(?:0|[1-9][0-9]{0,2})")

log = structlog.get_logger()


class Gate:
    """One per host. `open` and `close` belong to one event loop."""

    def __init__(self, identity: Identity, run_dir: Path) -> None:
        self._identity, self._run_dir = identity, run_dir
        self._asked: weakref.WeakKeyDictionary[ssl.SSLObject | ssl.SSLSocket, str] = weakref.WeakKeyDictionary()
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()

    async def open(self, address: Address) -> None:
        """Listen there. `BadAddress` when that cannot be."""
        context = self._identity.context()
        context.sni_callback = self._on_name
        try:
            self._server = await asyncio.start_server(
                self._arrived, address.host, address.port, ssl=context, limit=limits.GATE_BUFFER_BYTES,
                ssl_handshake_timeout=limits.GATE_HANDSHAKE_S, ssl_shutdown_timeout=limits.GATE_CLOSE_S,
            )  # fmt: skip
        except OSError as error:
            raise BadAddress(f"{address}: cannot listen there: {error.strerror}") from None

    async def close(self) -> None:
        """Cut every connection."""
        if self._server is not None:
            self._server.close()
        await self._tasks.cancel()

    def _on_name(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> int | None:
        process = (name or "").partition(".")[0]
        if not _PROCESS.fullmatch(process) or name != process_name(process, self._identity.name):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        self._asked[connection] = process
        return None

    def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._pass_on(reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("ssl_object")
        process = self._asked.get(connection)
        try:
            if process is None or _common_name(connection.getpeercert()) != HEAD:
                log.warning("gate: not the coordinator", peer=str(writer.get_extra_info("peername")))
                return
            notice_silence(writer.get_extra_info("socket"))
            try:
                inner = await asyncio.open_unix_connection(
                    str(self._run_dir / f"{process}.sock"), limit=limits.GATE_BUFFER_BYTES
                )
            except OSError:
                return  # that process does not run: the caller sees a closed connection, as from any dead server
            try:
                await first(_copy(reader, inner[1]), _copy(inner[0], writer))
            finally:
                inner[1].close()
        finally:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(limits.GATE_BUFFER_BYTES):
            writer.write(data)
            await writer.drain()


def notice_silence(connection: socket.socket) -> None:
    """A peer whose host or network is gone ends the connection, whether there are bytes to send or not."""
    silent_s = round(limits.GATE_SILENT_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, silent_s - 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)


def _common_name(certificate: dict[str, object] | None) -> str | None:
    subject = (certificate or {}).get("subject", ())
    assert isinstance(subject, tuple)
    return next((value for part in subject for key, value in part if key == "commonName"), None)
