"""How long refusals take when far too many ask in one moment: `python -m bench.refusals PACK`, or `--http`, `--grpc`.

The queue is filled with long requests; then, again and again, `--calls` connections ask at once: one write each, all
before the first answer is looked at. HTTP over connections that are open and over new ones, gRPC over open ones. The
client is made of bare sockets and frames written beforehand, so what is measured is the server: a gRPC client in
Python would take as long for its own part as the server takes.

Not here: what is refused and why (the coordinator). A time is from the first write until the answer's last byte.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import result
from bench.cluster import Cluster
from laneproto.v1 import serve_pb2

PROMPT = [5 + place % 200 for place in range(3000)]
GENERATE = f"/{serve_pb2.DESCRIPTOR.services_by_name['Expressway'].full_name}/Generate"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4  # HTTP/2 frames
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME_HEAD_BYTES = 9


class Unexpected(RuntimeError):
    """An answer that is no refusal."""


@dataclass(slots=True)
class Connection:
    """One client. `ended` looks at all that came since it asked: whether that is a whole refusal."""

    socket: socket.socket
    question: bytes
    ended: Callable[[bytearray], bool]


def connect(address: str, *, wait: bool = True) -> socket.socket:
    """To HOST:PORT or unix:PATH."""
    if address.startswith("unix:"):
        opened = socket.socket(socket.AF_UNIX)
        opened.connect(address.removeprefix("unix:"))
        return opened
    host, _, port = address.rpartition(":")
    opened = socket.socket()
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setblocking(wait)
    opened.connect_ex((host, int(port)))
    return opened


# --- HTTP/1.1


def http_question(prompt: Sequence[int], max_tokens: int) -> bytes:
    """One POST."""
    body = json.dumps({"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def http_ended(came: bytearray) -> bool:
    """The whole of a 429."""
    head, found, body = came.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 429"):
        raise Unexpected(bytes(head.partition(b"\r\n")[0]).decode())
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(body) >= int(length.partition(b":")[2])


# --- HTTP/2, as far as one unary question needs it


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_question(stream: int, request: serve_pb2.GenerateRequest) -> bytes:
    """One call: headers as plain literals, then the message."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": GENERATE,
        ":authority": "localhost", "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    message = request.SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    return frame(_HEADERS, _END_HEADERS, stream, block) + frame(_DATA, _END_STREAM, stream, body)


def grpc_ended(stream: int, came: bytearray) -> bool:
    """Whether the call has ended, without any message."""
    at = 0
    while at + _FRAME_HEAD_BYTES <= len(came):
        length = int.from_bytes(came[at : at + 3])
        kind, flags, of = struct.unpack(">BBI", came[at + 3 : at + _FRAME_HEAD_BYTES])
        at += _FRAME_HEAD_BYTES + length
        if of == stream and at <= len(came):
            if kind == _DATA:
                raise Unexpected("a message instead of a refusal")
            if flags & _END_STREAM:
                return True
    return False


def open_grpc(address: str) -> socket.socket:
    """A connection whose settings are agreed."""
    opened = connect(address)
    opened.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0) + frame(_SETTINGS, _ACK, 0))
    return opened


# --- a burst


def burst(connections: Sequence[Connection]) -> list[float]:
    """All ask in one moment; seconds until each was refused, in ascending order."""
    took_s: list[float] = []
    came = {each.socket: bytearray() for each in connections}
    with selectors.DefaultSelector() as selector:
        began = time.monotonic()
        for each in connections:
            selector.register(each.socket, selectors.EVENT_WRITE, each)
        while len(took_s) < len(connections):
            for key, events in selector.select(30.0):
                each = key.data
                if events & selectors.EVENT_WRITE:
                    each.socket.sendall(each.question)
                    selector.modify(each.socket, selectors.EVENT_READ, each)
                    continue
                got = each.socket.recv(1 << 16)
                if not got:
                    raise Unexpected("the connection was closed")
                came[each.socket] += got
                if each.ended(came[each.socket]):
                    took_s.append(time.monotonic() - began)
                    selector.unregister(each.socket)
    return sorted(took_s)


def over_http(address: str, calls: int, rounds: int, *, fresh: bool) -> list[list[float]]:
    """Rounds of refusals over open connections, or over new ones, the time to connect among the rest."""
    question, took = http_question(PROMPT, 20), []
    with ExitStack() as ends:
        opened = [] if fresh else [ends.enter_context(connect(address)) for _ in range(calls)]
        for _ in range(rounds):
            sockets = opened or [ends.enter_context(connect(address, wait=False)) for _ in range(calls)]
            took.append(burst([Connection(each, question, http_ended) for each in sockets]))
            time.sleep(0.2)
    return took


def over_grpc(address: str, calls: int, rounds: int) -> list[list[float]]:
    """Rounds of refusals, one call at a time on each connection."""
    request = serve_pb2.GenerateRequest(token_ids=serve_pb2.TokenIds(ids=PROMPT), max_tokens=20)
    took = []
    with ExitStack() as ends:
        sockets = [ends.enter_context(open_grpc(address)) for _ in range(calls)]
        time.sleep(0.5)  # their settings come and are passed over
        for stream in itertools.islice(itertools.count(1, 2), rounds):
            question, ended = grpc_question(stream, request), functools.partial(grpc_ended, stream)
            took.append(burst([Connection(each, question, ended) for each in sockets]))
            time.sleep(0.2)
    return took


def fill(address: str, places: int) -> list[socket.socket]:
    """Long requests, until the server has no place for one more; they end with their connections."""
    question, held = http_question([5], 1 << 20), []
    for _ in range(places):
        held.append(connect(address))
        held[-1].sendall(question)
        held[-1].settimeout(0.05)
        try:
            if held[-1].recv(1 << 12).startswith(b"HTTP/1.1 429"):
                return held
        except TimeoutError:
            continue
    raise Unexpected(f"{places} requests did not fill the queue")


def shown(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds: medians over rounds, and the worst round's 99th percentile."""
    p99 = [each[int(0.99 * (len(each) - 1) + 0.5)] for each in rounds]
    p50 = [statistics.median(each) for each in rounds]
    times = {"p50": statistics.median(p50), "p99": statistics.median(p99), "p99_worst_round": max(p99)}
    return {name: round(1e3 * seconds, 2) for name, seconds in times.items()}


def measure(http: str, grpc: str, calls: int, rounds: int, places: int) -> dict[str, object]:
    """All three ways, after two rounds that warm up."""
    with ExitStack() as ends:
        for each in fill(http, places):
            ends.enter_context(each)
        found = {
            "http_open": over_http(http, calls, rounds + 2, fresh=False)[2:],
            "http_new": over_http(http, calls, rounds + 2, fresh=True)[2:],
            "grpc_open": over_grpc(grpc, calls, rounds + 2)[2:],
        }
    return {"milliseconds": {name: shown(each) for name, each in found.items()}, "load": os.getloadavg()[0]}


def main() -> None:
    """Runs it and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, nargs="?", help="serve this pack on one lane")
    parser.add_argument("--http", help="measure a server that runs already: HOST:PORT")
    parser.add_argument("--grpc", help="HOST:PORT or unix:PATH")
    parser.add_argument("--calls", type=int, default=120, help="at one moment")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--places", type=int, default=400, help="requests, at most, that fill its queue")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = (options.calls, options.rounds, options.places)
    if options.pack is None:
        measured = measure(options.http, options.grpc, *asked)
    else:
        serve = ["--lanes", "1", "--cluster", f"refusals-{os.getpid()}", "--http", "127.0.0.1:0"]
        with Cluster(options.pack, [*serve, "--grpc", "127.0.0.1:0", "--page", "off"], quiet=True) as cluster:
            measured = measure(cluster.http, cluster.grpc, *asked)
    framed = result.frame(
        "bench.refusals", ["PACK"] if options.pack else ["--http", "--grpc"],
        pack={"name": options.pack.name} if options.pack else {}, packages=("expressway", "aiohttp", "grpcio"),
        conditions={"calls": options.calls, "rounds": options.rounds, "prompt_tokens": len(PROMPT)},
    )  # fmt: skip
    result.write({**framed, **measured}, options.out)


if __name__ == "__main__":
    main()
