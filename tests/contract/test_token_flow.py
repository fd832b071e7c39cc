"""A token leaves when it exists: in lock-step for eight streams of every kind, and how far gaps move on the way.

EXPRESSWAY_FLOW_TOKENS is how many tokens each measured stream has (60); figures of a quiet machine are in bench/LOG.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coordinator.telemetry.journal import Journal
from coordinator.telemetry.request_record import RequestRecord
from laneproto.v1 import serve_pb2
from tests.fakes import lane as fake_lane
from tests.fakes.doors import Cluster, open_doors, spelt
from tests.fakes.lane import Script

STREAMS = 8
TOKENS = int(os.environ.get("EXPRESSWAY_FLOW_TOKENS", "60"))
PACE_S = 0.02
HELLO = [{"role": "user", "content": "Hello"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/completions": {"prompt": "Hello", "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/messages": {"messages": HELLO, "max_tokens": TOKENS},
    "/v1/responses": {"input": "Hello", "max_output_tokens": TOKENS},
}
TEXT = spelt("The quick brown fox jumps over the lazy dog. " * 40)


def text_of(event: Any) -> str:
    """What an event of any of the four APIs says."""
    if not isinstance(event, dict):
        return ""
    if choices := event.get("choices"):
        return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
    delta = event.get("delta")
    return delta if isinstance(delta, str) else (delta or {}).get("text", "")


async def over_http(cluster: Cluster, path: str, ids: list[str]) -> AsyncIterator[str]:
    async with cluster.http.post(path, json={**ASKS[path], "stream": True}) as response:
        assert response.status == 200, await response.text()
        ids.append(response.headers["x-request-id"])
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{") and (text := text_of(json.loads(data))):
                yield text


async def over_grpc(cluster: Cluster, ids: list[str]) -> AsyncIterator[str]:
    asked = serve_pb2.GenerateRequest(text="Hello", max_tokens=TOKENS)
    async for event in cluster.stub.Generate(asked):
        ids += [event.started.request_id] if event.HasField("started") else []
        if event.delta.text:
            yield event.delta.text


def streams(cluster: Cluster) -> list[tuple[AsyncIterator[str], list[str]]]:
    """Eight, each with a list that its id comes to: each API, gRPC among them, then again."""
    found: list[tuple[AsyncIterator[str], list[str]]] = []
    for path in [*ASKS, None, *ASKS, None][:STREAMS]:
        ids: list[str] = []
        found.append((over_grpc(cluster, ids) if path is None else over_http(cluster, path, ids), ids))
    return found


async def test_the_next_token_is_not_made_before_the_last_one_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane makes a token only once the reader has all those before it: what was held back would never come."""
    made = 12
    gates: dict[str, asyncio.Semaphore] = {}
    begun: asyncio.Queue[str] = asyncio.Queue()

    async def gate(run: Any, seconds: float) -> None:
        if run.request_id not in gates:  # the prompt
            gates[run.request_id] = asyncio.Semaphore(0)
            begun.put_nowait(run.request_id)
            return
        await gates[run.request_id].acquire()

    monkeypatch.setattr(fake_lane, "_pause", gate)

    async def read(stream: AsyncIterator[str], order: asyncio.Lock) -> None:
        async with order:  # which request is whose
            first = asyncio.ensure_future(anext(stream))
            request_id = await begun.get()
        gates[request_id].release()
        said = await first
        for _ in range(made - 1):
            gates[request_id].release()
            said += await anext(stream)
        assert said == fox[: len(said)]
        for _ in range(TOKENS):
            gates[request_id].release()
        async for _ in stream:
            pass

    script = Script(tokens=TEXT)
    async with open_doors(tmp_path, lanes=STREAMS, script=script) as cluster, asyncio.timeout(120):
        fox = "".join(cluster.doors.serving.text.token_text(token) for token in TEXT)
        order = asyncio.Lock()
        await asyncio.gather(*(read(stream, order) for stream, _ in streams(cluster)))


async def test_gaps_are_those_of_the_lane(tmp_path: Path) -> None:
    """Prints how far the gap between two events is from that of their tokens; asserts only that all came."""
    records: list[RequestRecord] = []
    arrivals: dict[str, list[float]] = {}

    async def read(stream: AsyncIterator[str], ids: list[str]) -> None:
        seen = [time.monotonic() async for _ in stream]
        arrivals[ids[0]] = seen

    script = Script(tokens=TEXT, token_delay_s=PACE_S)
    async with open_doors(tmp_path, lanes=STREAMS, script=script, journal=Journal(records.append)) as cluster:
        await asyncio.gather(*(read(*stream) for stream in streams(cluster)))
    assert {record.id for record in records} == arrivals.keys()
    moved: list[float] = []
    for record in records:
        stamps, seen = [stamp / 1e9 for stamp in record.stamps_ns or ()], arrivals[record.id]
        assert len(stamps) == TOKENS
        if len(seen) == len(stamps):  # else two tokens came as one event, of a machine that was busy
            moved += [abs((b - a) - (d - c)) for (a, b), (c, d) in zip(pairwise(seen), pairwise(stamps), strict=True)]
    moved.sort()
    if moved:
        shown = {"p50": moved[len(moved) // 2], "p99": moved[int(0.99 * len(moved))], "most": moved[-1]}
        print(f"{len(moved)} gaps, moved by", ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in shown.items()))
