"""Requests as OpenTelemetry spans: in memory, and all the way to a collector's own protocol on this host."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from coordinator.config import BadOption
from coordinator.telemetry.journal import Journal
from coordinator.telemetry.spans import SpanWriter, check_otlp
from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors, until
from tests.fakes.lane import Script

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
SECRET = "sesame-of-a-client"
BODY = {"prompt": "a text that nobody should see", "max_tokens": 3}


@pytest.fixture
def spans() -> Iterator[tuple[SpanWriter, InMemorySpanExporter]]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    writer = SpanWriter(provider)
    yield writer, kept
    writer.close()


def by_name(kept: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = {span.name: span for span in kept.get_finished_spans()}
    assert len(found) == len(kept.get_finished_spans())
    return found


async def test_a_request_and_its_parts(tmp_path: Path, spans: tuple[SpanWriter, InMemorySpanExporter]) -> None:
    writer, kept = spans
    async with open_doors(tmp_path, lanes=1, script=Script(), journal=Journal(writer.write)) as cluster:
        headers = {"traceparent": PARENT, "x-session-id": SECRET}
        status, _, _ = await cluster.post("/v1/completions", BODY, headers)
        assert status == 200
    found = by_name(kept)
    assert found.keys() == {"request", "queue", "prefill", "decode"}
    request = found["request"]
    assert request.parent is not None
    assert f"00-{request.parent.trace_id:032x}-{request.parent.span_id:016x}-01" == PARENT
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert (attributes["expressway.lane"], attributes["expressway.outcome"]) == ("lane-0", "length")
    times = [found["queue"], found["prefill"], found["decode"]]
    assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in times)
    edges = [
        request.start_time,
        *(time for span in times for time in (span.start_time, span.end_time)),
        request.end_time,
    ]
    assert edges == sorted(edges)
    assert edges[::2] == edges[1::2]  # each begins where the one before ends
    assert request.status.status_code is StatusCode.UNSET
    said = "".join(span.to_json() for span in found.values())
    assert SECRET not in said
    assert "nobody should see" not in said


async def test_failures_replays_and_what_no_lane_took(
    tmp_path: Path, spans: tuple[SpanWriter, InMemorySpanExporter]
) -> None:
    writer, kept = spans
    async with open_doors(tmp_path, lanes=2, journal=Journal(writer.write)) as cluster:
        cluster.lanes[0].script_next(fault="break", fault_after=1)
        await cluster.post("/v1/completions", BODY)
        request = by_name(kept)["request"]
        assert request.events[0].name == "replayed"
        kept.clear()
        cluster.lanes[1].script_next(fault="error", fault_after=1)
        cluster.roster.set_state("lane-0", "quarantined")
        await cluster.post("/v1/completions", BODY)
        request = by_name(kept)["request"]
        assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, "lane_failed")
        kept.clear()
        cluster.roster.set_state("lane-1", "starting")
        call = cluster.stub.Generate(serve_pb2.GenerateRequest(text="x"))
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await until(lambda: bool(kept.get_finished_spans()), 60)
    found = by_name(kept)
    assert found.keys() == {"request", "queue"}
    assert (found["request"].attributes or {})["expressway.outcome"] == "cancelled"


@pytest.mark.parametrize(
    ("header", "kept_spans", "has_parent"),
    [(None, 4, False), (UNSAMPLED, 0, False), ("00-zz", 4, False), (f"{PARENT}, {PARENT}", 4, False), (PARENT, 4, True),
     (PARENT.replace("00-", "ff-", 1), 4, False), ("00-" + "0" * 32 + PARENT[35:], 4, False)],
)  # fmt: skip
async def test_whose_span_it_belongs_to(
    tmp_path: Path,
    spans: tuple[SpanWriter, InMemorySpanExporter],
    header: str | None,
    kept_spans: int,
    has_parent: bool,
) -> None:
    writer, kept = spans
    async with open_doors(tmp_path, lanes=1, journal=Journal(writer.write)) as cluster:
        await cluster.post("/v1/completions", BODY, {"traceparent": header} if header else None)
        metadata = (("traceparent", header),) if header else ()
        await cluster.generate(metadata, text="x", max_tokens=3)
    found = kept.get_finished_spans()
    assert len(found) == 2 * kept_spans
    assert all((span.parent is not None) is has_parent for span in found if span.name == "request")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "expressway"
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_a_collector_gets_them(tmp_path: Path) -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        writer = SpanWriter.open(check_otlp(f"http://127.0.0.1:{port}"))
        async with open_doors(tmp_path, lanes=1, journal=Journal(writer.write)) as cluster:
            await cluster.post("/v1/completions", BODY)
        await asyncio.to_thread(writer.close)
    finally:
        server.stop(None).wait()
    assert sorted(span.name for span in collector.spans) == ["decode", "prefill", "queue", "request"]


async def test_nobody_waits_for_a_collector_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        writer = SpanWriter.open(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        async with open_doors(tmp_path, lanes=1, journal=Journal(writer.write)) as cluster, asyncio.timeout(120):
            for _ in range(20):
                assert (await cluster.post("/v1/completions", BODY))[0] == 200
            await asyncio.to_thread(writer.close)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:4317", "http://localhost", "ftp://localhost:1", "http://a:b", "http://a:1/path", "http://u@a:1",
     "http://[::1", "http://a:99999", "http://a:1?x"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(BadOption, match="--otlp"):
        check_otlp(url)


def test_without_the_extra_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadOption, match=r"expressway\[otel\]"):
        check_otlp("http://localhost:4317")


def test_a_coordinator_without_the_option_loads_none_of_it() -> None:
    code = "import sys, coordinator.service; sys.exit(any(m.startswith('opentelemetry.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
