"""Ended requests as OpenTelemetry spans, for who runs a collector: the extra `otel`, off without `serve --otlp URL`.

    request (queued … ended)          the client's own span is its parent, where it sent `traceparent`
    ├── queue   queued … a lane began
    ├── prefill a lane began … first token
    └── decode  first token … ended

Names of attributes are OpenTelemetry's for generative AI where there are such, else `expressway.…`. A span is made when
its request has ended, from the same record that traces of lines are made of.

Not here: what is recorded (stats.Timeline), lines (trace). Invariants: no text, no token ids, no name of a session;
nobody who serves waits for a collector: what it does not take in time is dropped.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import time
import urllib.parse
from typing import TYPE_CHECKING, Final

from coordinator.errors import BadOption
from coordinator.telemetry.request_record import RequestRecord
from coordinator.telemetry.stats import COMPLETE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

EXTRA: Final = "otel"
FLUSH_S: Final = 5.0  # that spans get at the end
_NEEDED: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")


def check_otlp(url: str) -> str:
    """A collector's address, http://HOST:PORT or https://HOST:PORT. BadOption: it is none, or the extra is missing."""
    try:
        found = urllib.parse.urlsplit(url)
        good = found.scheme in ("http", "https") and bool(found.hostname) and found.port is not None
    except ValueError:
        good = False
    if not good or found.path not in ("", "/") or found.query or found.fragment or found.username:
        raise BadOption(f"--otlp {url}: takes http://HOST:PORT or https://HOST:PORT of a collector's gRPC port")
    try:
        missing = not all(importlib.util.find_spec(name) for name in _NEEDED)
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise BadOption(f"--otlp needs the extra {EXTRA!r}: pip install 'expressway[{EXTRA}]'")
    return url


class SpanWriter:
    """One per coordinator."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("expressway", importlib.metadata.version("expressway"))
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, url: str) -> SpanWriter:
        """Sends to a collector, in a thread of its own; connects with the first span."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        version = importlib.metadata.version("expressway")
        resource = Resource.create({"service.name": "expressway", "service.version": version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=FLUSH_S)))
        return cls(provider)

    def write(self, record: RequestRecord) -> None:
        """Soon. Call from the event loop; the record no longer changes."""
        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        above = self._context.extract({"traceparent": record.trace_parent}) if record.trace_parent else None
        begun, first, ended = record.begun_s, record.first_token_s, record.ended_s or record.queued_s
        span = self._tracer.start_span("request", above, start_time=at(record.queued_s), attributes=_attributes(record))
        parts = (
            ("queue", record.queued_s, begun or ended),
            ("prefill", begun, first or ended),
            ("decode", first, ended),
        )
        for name, start, end in parts:
            if start is not None:
                self._part(span, name, at(start), at(end))
        for lane, tokens in record.lanes[1:]:
            span.add_event("replayed", {"expressway.lane": lane, "expressway.tokens_before": tokens}, at(ended))
        if record.outcome not in (*COMPLETE, "cancelled"):
            self._failed(span, record.outcome)
        span.end(at(ended))

    def close(self) -> None:
        """Sends what waits. Blocks for `FLUSH_S` at most."""
        self._provider.force_flush(int(FLUSH_S * 1e3))
        self._provider.shutdown()

    def _part(self, above: Span, name: str, start_ns: int, end_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer.start_span(name, set_span_in_context(above), start_time=start_ns).end(end_ns)

    def _failed(self, span: Span, code: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, code))
        span.set_attribute("error.type", code)


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "gen_ai.system": "expressway",
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.tokens,
        "expressway.request_id": record.id,
        "expressway.door": record.door,
        "expressway.tenant": record.tenant,
        "expressway.cached_tokens": record.cached_tokens,
        "expressway.outcome": record.outcome,
        "expressway.lane": record.lane,
    }
    if record.session:
        found["expressway.session_digest"] = hashlib.sha256(record.session.encode()).hexdigest()[:16]
    return found
