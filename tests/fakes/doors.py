"""Both doors over real sockets on simulated lanes: what the contract tests of the request side stand on."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from bench.tokenizer import write_tokenizer
from coordinator import limits
from coordinator.auth import Auth
from coordinator.config import Address
from coordinator.frontdoor import Doors, start_doors
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.stats import Recorder
from coordinator.text.tokenizer import Tokenizer
from coordinator.tls import Tls
from laneproto.v1 import serve_pb2, serve_pb2_grpc
from tests.fakes.lane import FakeLane, Script
from tests.fakes.qwen_template import TEMPLATE
from tests.fakes.roster import FakeRoster

VOCAB_SIZE = 384


@functools.cache
def tokenizer_dir() -> Path:
    """A directory with a small tokenizer; made once per process."""
    directory = Path(tempfile.mkdtemp(prefix="expressway-tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_tokenizer(directory, VOCAB_SIZE)
    return directory


@dataclass
class Cluster:
    """Lanes, roster and open doors."""

    lanes: list[FakeLane]
    roster: FakeRoster
    doors: Doors
    http: aiohttp.ClientSession
    stub: serve_pb2_grpc.ExpresswayStub
    channel: grpc.aio.Channel

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], Any]:
        """One POST: status, headers in lower case, body."""
        async with self.http.post(path, json=body, headers=headers) as response:
            return (
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await _body(response),
            )

    async def get(self, path: str, method: str = "GET") -> tuple[int, Any]:
        """One request without a body."""
        async with self.http.request(method, path) as response:
            return response.status, await _body(response)

    async def generate(
        self, metadata: tuple[tuple[str, str], ...] = (), **fields: Any
    ) -> list[serve_pb2.GenerateResponse]:
        """All events of one gRPC generation."""
        return [event async for event in self.stub.Generate(serve_pb2.GenerateRequest(**fields), metadata=metadata)]


async def _body(response: aiohttp.ClientResponse) -> Any:
    text = await response.text()
    return json.loads(text) if response.content_type == "application/json" else text


@contextlib.asynccontextmanager
async def open_doors(
    directory: Path,
    *,
    lanes: int = 2,
    script: Script | None = None,
    queue_requests: int = limits.QUEUE_REQUESTS,
    text_from: Path | None = None,
    recorder: Recorder | None = None,
    journal: Journal | None = None,
    auth: Auth | None = None,
    tls: Tls | None = None,
    **lane_options: Any,
) -> AsyncIterator[Cluster]:
    """A cluster whose sockets lie in `directory`."""
    options = {"vocab_size": VOCAB_SIZE, "eos_ids": (2,), **lane_options}
    fakes = [
        FakeLane(directory / f"lane-{k}.sock", name=f"lane-{k}", script=script or Script(), **options)
        for k in range(lanes)
    ]
    for fake in fakes:
        await fake.start()
    roster = FakeRoster(*fakes)
    doors = await start_doors(
        roster,
        text_from or tokenizer_dir(),
        http=Address("127.0.0.1", 0),
        grpc_at=Address(path=str(directory / "grpc.sock")),
        queue_requests=queue_requests,
        recorder=recorder,
        journal=journal,
        auth=auth,
        tls=tls,
    )
    try:
        async with (
            aiohttp.ClientSession(f"http://{doors.http}") as http,
            grpc.aio.insecure_channel(f"{doors.grpc}") as channel,
        ):
            yield Cluster(fakes, roster, doors, http, serve_pb2_grpc.ExpresswayStub(channel), channel)
    finally:
        await doors.close()
        await roster.close()
        for fake in fakes:
            await fake.stop()


def events_of(stream: str) -> list[Any]:
    """The events of an event stream's text; "[DONE]" stays a string, comments are left out."""
    found = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")]
    return [value if value == "[DONE]" else json.loads(value) for value in found]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for a condition of the loop's own state."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@functools.cache
def thinking_dir() -> Path:
    """The same tokenizer with the chat template of a model that thinks; made once per process."""
    directory = Path(tempfile.mkdtemp(prefix="expressway-thinking-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_tokenizer(directory, VOCAB_SIZE)
    file = directory / "tokenizer.json"
    spec = json.loads(file.read_text())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"]  # as released tokenizers have it
    file.write_text(json.dumps(spec))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def spelt(text: str) -> tuple[int, ...]:
    """The tokens of an answer that a lane is to make up; markers of reasoning are their own tokens."""
    tokenizer = Tokenizer.load(tokenizer_dir())
    assert tokenizer is not None
    ids: list[int] = []
    for piece in re.split("(</?think>|<[|]im_end[|]>)", text):
        special = tokenizer.special(piece)
        ids += tokenizer.encode(piece) if special is None else [special]
    return tuple(ids)
