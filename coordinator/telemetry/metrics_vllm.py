"""The names under which routers look for a model server's load and times: those of vLLM, from our own figures.

    expressway_* families ──▶ vllm:* families, one series each: the server as a whole is one engine

Not here: figures of our own (metrics, metrics_state). Pure. Invariants: nothing is counted here, so an alias says what
the metric that it stands for says; the labels are the model's name and engine "0"; before a lane was ready there is no
sample, as there is no model to name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.stats import COMPLETE

_LABELS: Final = ("model_name", "engine")
# ours -> theirs: the same samples under another name
_HISTOGRAMS: Final[Mapping[str, str]] = {
    "expressway_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "expressway_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "expressway_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "expressway_queue_wait_seconds": "vllm:request_queue_time_seconds",
}
_COUNTERS: Final[Mapping[str, str]] = {
    "expressway_prompt_tokens": "vllm:prompt_tokens",
    "expressway_generated_tokens": "vllm:generation_tokens",
}


def aliases(state: State, own: Iterable[Metric]) -> Iterator[Metric]:
    """Every alias exactly once. `own`: the families of metrics."""
    labels = {} if state.model is None else dict(zip(_LABELS, (state.model.name, "0"), strict=True))
    by_name = {metric.name: metric for metric in own}
    for ours, theirs in {**_HISTOGRAMS, **_COUNTERS}.items():
        yield _renamed(by_name[ours], theirs, labels)
    yield _successes(by_name["expressway_requests"], labels)
    yield from _load(state, tuple(labels.values()))


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    alias = Metric(name, f"Alias of {metric.name}{'_total' if metric.type == 'counter' else ''}.", metric.type)
    for sample in metric.samples if labels else ():
        alias.samples.append(
            Sample(name + sample.name.removeprefix(metric.name), {**sample.labels, **labels}, sample.value)
        )
    return alias


def _successes(requests: Metric, labels: Mapping[str, str]) -> Metric:
    family = CounterMetricFamily(
        "vllm:request_success", "Answers that ended by themselves.", labels=[*_LABELS, "finished_reason"]
    )
    ended = [sample for sample in requests.samples if sample.name == "expressway_requests_total"]
    for outcome in COMPLETE if labels else ():
        count = sum(sample.value for sample in ended if sample.labels["outcome"] == outcome)
        family.add_metric([*labels.values(), outcome], count)
    return family


def _load(state: State, labels: tuple[str, ...]) -> Iterator[Metric]:
    totals = state.totals.values()

    def every_lanes(field: str) -> int:
        return sum(lane[field] for lane in totals)

    budget = every_lanes("state_budget_bytes")
    used = every_lanes("state_used_bytes") / budget if budget else 0.0
    hits = every_lanes("reused_tokens")
    gauges = {
        "num_requests_running": ("Alias of expressway_lane_running_requests, all lanes.", sum(state.running.values())),
        "num_requests_waiting": ("Alias of expressway_queue_requests.", state.queued),
        "kv_cache_usage_perc": ("Share of the lanes' memory for conversations that is in use; 1 is all.", used),
        "gpu_cache_usage_perc": ("The older name of vllm:kv_cache_usage_perc.", used),
    }
    counters = {
        "prefix_cache_queries": ("Prompt tokens of lanes, read or not.", hits + every_lanes("prompt_tokens")),
        "prefix_cache_hits": ("Alias of expressway_lane_reused_tokens_total, all lanes.", hits),
    }
    counters |= {
        f"gpu_{name}": (f"The older name of vllm:{name}_total.", value) for name, (_, value) in counters.items()
    }
    for name, (said, value) in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", said, labels=_LABELS)
        if labels:
            gauge.add_metric(labels, value)
        yield gauge
    for name, (said, value) in counters.items():
        counter = CounterMetricFamily(f"vllm:{name}", said, labels=_LABELS)
        if labels:
            counter.add_metric(labels, value)
        yield counter
