"""A process that answers a coordinator's pings and does nothing else: `python -m tests.fakes.coordinator SOCKET`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

import grpc

from laneproto.v1 import admin_pb2, admin_pb2_grpc


class _Admin(admin_pb2_grpc.AdminServicer):
    async def Ping(self, request, context):
        print("pinged", flush=True)
        return admin_pb2.PingReply()


async def _main(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServicer_to_server(_Admin(), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
