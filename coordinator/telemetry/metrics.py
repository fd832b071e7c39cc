"""What is counted as it happens, and the whole of `/metrics` as text in the Prometheus format.

Not here: what is read when somebody asks (metrics_state), the socket (doors.page). Invariants: the registry is this
object's own; label values come from fixed lists: doors, finish reasons and the codes of errors, never from a client.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coordinator.errors import CoordinatorError
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.metrics_state import families
from coordinator.telemetry.metrics_vllm import aliases
from coordinator.telemetry.stats import COMPLETE, Door

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_GAP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_WHOLE_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)


class Metrics:
    """Implements `stats.Recorder`; one per coordinator."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._outcomes = frozenset({*COMPLETE, "cancelled", *_codes(CoordinatorError)})
        self._requests = Counter(
            "expressway_requests_total", "Requests for an answer that have ended, by door and outcome.",
            ["door", "outcome"], registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Counter(
            "expressway_prompt_tokens_total", "Prompt tokens of requests that a lane began.", registry=registry
        )
        self._generated_tokens = Counter(
            "expressway_generated_tokens_total", "Tokens of answers that came from lanes.", registry=registry
        )
        self._wait = Histogram(
            "expressway_queue_wait_seconds", "From a request's place in the queue until a lane began with it.",
            buckets=_WAIT_S, registry=registry,
        )  # fmt: skip
        self._first_token = Histogram(
            "expressway_time_to_first_token_seconds", "From a request's place in the queue to its first token.",
            buckets=_FIRST_TOKEN_S, registry=registry,
        )  # fmt: skip
        self._gap = Histogram(
            "expressway_inter_token_seconds", "Between two tokens of an answer, as the lane stamped them.",
            buckets=_GAP_S, registry=registry,
        )  # fmt: skip
        self._whole = Histogram(
            "expressway_request_duration_seconds",
            "From a request's place in the queue to its end; only answers that ended by a stop or their length.",
            buckets=_WHOLE_S, registry=registry,
        )  # fmt: skip
        Info("expressway_build", "Version of this server.", registry=registry).info(
            {"version": importlib.metadata.version("expressway"), "python": platform.python_version()}
        )
        ProcessCollector(registry=registry)  # process_*: this coordinator's memory, processor time and descriptors
        for door in ("http", "grpc"):
            for outcome in COMPLETE:
                self._requests.labels(door, outcome)  # a rate needs the zero before the first

    def request(self, door: Door, outcome: str) -> None:
        """A request has ended."""
        self._requests.labels(door, outcome if outcome in self._outcomes else "other").inc()

    def accepted(self, prompt_tokens: int, waited_s: float) -> None:
        """A lane has begun with a request."""
        self._prompt_tokens.inc(prompt_tokens)
        self._wait.observe(waited_s)

    def first_token(self, seconds: float) -> None:
        """The first token of an answer is here."""
        self._first_token.observe(seconds)

    def tokens(self, count: int, gaps_s: Sequence[float]) -> None:
        """More tokens of an answer."""
        self._generated_tokens.inc(count)
        for gap_s in gaps_s:
            self._gap.observe(gap_s)

    def complete(self, seconds: float) -> None:
        """An answer ended by itself."""
        self._whole.observe(seconds)

    def outcomes(self) -> dict[str, int]:
        """Ended requests by outcome, whatever their door."""
        counts: dict[str, int] = {}
        for metric in self._requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    outcome = sample.labels["outcome"]
                    counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    def pieces(self, state: State) -> Iterator[bytes]:
        """Everything, in `CONTENT_TYPE`, a family at a time: all of them take 5 ms, and streams want to go on."""
        own = list(self._registry.collect())
        for metric in own:  # without the library's time of creation of each series, a second series each
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        for metric in itertools.chain(own, families(state), aliases(state, own)):
            yield generate_latest(_One(metric))

    def render(self, state: State) -> bytes:
        """Everything at once."""
        return b"".join(self.pieces(state))


class _One(Collector):
    """What the library wants to be given: something that collects."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _codes(error: type[CoordinatorError]) -> Iterator[str]:
    yield error.code
    for each in error.__subclasses__():
        yield from _codes(each)
