"""What the gate of a host costs: calls and streams of small messages over a Unix socket, straight and through TLS.

    python -m bench.gate [--rounds 20] [--calls 200] [--messages 5000]

Server and gate run in one child process, both ends on this machine: what a network adds is not
in it. Straight and through the gate by turns; medians over rounds. Not here: lanes. Invariant: both ways carry the same
bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import grpc
import grpc.aio

from coordinator.config import Address, choose_address
from coordinator.fleet.link import Link
from coordinator.host import authority
from coordinator.host.gate import Gate
from coordinator.host.identity import Identity

ONE, MANY = "/bench.Gate/One", "/bench.Gate/Many"
MESSAGE = b"x" * 24  # about a token's


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method == ONE:
            return grpc.unary_unary_rpc_method_handler(self._one)
        return grpc.unary_stream_rpc_method_handler(self._many)

    async def _one(self, request: bytes, context: object) -> bytes:
        return request

    async def _many(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield MESSAGE


def _host(folder: str, port: Connection) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Service(),))
        server.add_insecure_port(f"unix:{folder}/lane-0.sock")
        await server.start()
        at = choose_address(Address("127.0.0.1"))
        await Gate(Identity.load(Path(folder) / "b.pem"), Path(folder)).open(at)
        port.send(str(at))
        await asyncio.Event().wait()

    asyncio.run(run())


async def _round(channel: grpc.aio.Channel, calls: int, messages: int) -> tuple[float, float]:
    """Milliseconds of a call, and messages a second of a stream."""
    one, many = channel.unary_unary(ONE), channel.unary_stream(MANY)
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        await one(MESSAGE)
        seconds.append(time.perf_counter() - began)
    began, got = time.perf_counter(), 0
    async for message in many(str(messages).encode()):
        got += len(message) > 0
    assert got == messages
    return 1e3 * median(seconds), messages / (time.perf_counter() - began)


async def measure(folder: str, address: str, rounds: int, calls: int, messages: int) -> dict[str, float]:
    """Medians over rounds, and of what a round's two ways differ by."""
    link = Link("b", "b", address, Identity.load(Path(folder) / "head.pem"))
    async with (
        grpc.aio.insecure_channel(f"unix:{folder}/lane-0.sock") as straight,
        link.channel("lane-0", ()) as through,
    ):
        for channel in (straight, through):
            await _round(channel, 20, 200)
        found = [[await _round(channel, calls, messages) for channel in (straight, through)] for _ in range(rounds)]
    return {
        "call_ms": round(median(a[0] for a, _ in found), 3),
        "call_through_gate_ms": round(median(b[0] for _, b in found), 3),
        "call_added_ms": round(median(b[0] - a[0] for a, b in found), 3),
        "messages_per_s": round(median(a[1] for a, _ in found)),
        "messages_per_s_through_gate": round(median(b[1] for _, b in found)),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("rounds", 20), ("calls", 200), ("messages", 5000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exw-") as folder:
        authority.create(Path(folder))
        authority.invite(Path(folder), "b")
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_host, args=(folder, theirs), daemon=True)
        child.start()
        try:
            found = asyncio.run(measure(folder, ours.recv(), asked.rounds, asked.calls, asked.messages))
        finally:
            child.kill()
            child.join()
    conditions = {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count(), "host": platform.machine()}
    print(json.dumps({**found, **vars(asked), **conditions}))


if __name__ == "__main__":
    main()
