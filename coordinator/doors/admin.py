"""The operator's door: `admin.proto` on coordinator.sock in the run directory.

Not here: what the operations do (operations). Invariants: the socket is 0600 in a directory of this user alone, which
is the access control; an error carries its stable code in trailing metadata, like everywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from coordinator.auth import Auth
from coordinator.doors.grpc import ExpresswayServicer
from coordinator.doors.rich_error import abort
from coordinator.errors import CoordinatorError
from coordinator.fleet.operations import Operations, Progress
from coordinator.grpc_server import start_server
from coordinator.serving import Serving
from laneproto.v1 import admin_pb2, admin_pb2_grpc, serve_pb2_grpc

Context: TypeAlias = grpc.aio.ServicerContext


class AdminService(admin_pb2_grpc.AdminServicer):
    """The service on one `Operations`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def Ping(self, request: admin_pb2.PingRequest, context: Context) -> admin_pb2.PingReply:
        """The event loop gets on."""
        return admin_pb2.PingReply()

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> None:
        """Out of service."""
        await _tell(self._operations.drain(request.lane, stop=request.stop), context)

    async def Undrain(self, request: admin_pb2.LaneName, context: Context) -> admin_pb2.Progress:
        """Into service."""
        try:
            return _message(self._operations.undrain(request.lane))
        except CoordinatorError as error:
            await abort(context, error)

    async def Restart(self, request: admin_pb2.RestartRequest, context: Context) -> None:
        """One lane after the other."""
        await _tell(self._operations.restart(tuple(request.lanes)), context)

    async def Add(self, request: admin_pb2.AddRequest, context: Context) -> admin_pb2.LaneName:
        """One more."""
        try:
            return admin_pb2.LaneName(lane=await self._operations.add(request.host))
        except CoordinatorError as error:
            await abort(context, error)

    async def Remove(self, request: admin_pb2.LaneName, context: Context) -> None:
        """One less."""
        await _tell(self._operations.remove(request.lane), context)


@contextlib.asynccontextmanager
async def admin_door(operations: Operations, socket: Path, serving: Serving | None = None) -> AsyncIterator[None]:
    """The door, open."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket)  # of a coordinator that was killed; the supervisor runs one at a time
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(operations), server)
    if serving is not None:  # who may open this socket needs no key
        serve_pb2_grpc.add_ExpresswayServicer_to_server(ExpresswayServicer(serving, Auth()), server)
    server.add_insecure_port(f"unix:{socket}")
    await start_server(server)
    os.chmod(socket, 0o600)
    try:
        yield
    finally:
        await server.stop(None)


async def _tell(steps: AsyncGenerator[Progress, None], context: Context) -> None:
    try:
        async for progress in steps:
            await context.write(_message(progress))
    except CoordinatorError as error:
        await abort(context, error)
    finally:
        await steps.aclose()


def _message(progress: Progress) -> admin_pb2.Progress:
    return admin_pb2.Progress(lane=progress.lane, state=progress.state, doing=progress.doing, running=progress.running)
