"""`/metrics` as text: readable by the library's own parser, by the rules of promtool, with bounded labels."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families as parse

from coordinator import errors
from coordinator.fleet.lane_view import LaneView, ModelView, RegionView, StepTimes, step_times
from coordinator.host.owner_status import OwnerStatus
from coordinator.telemetry.cluster_state import State
from coordinator.telemetry.lane_totals import FIELDS, LaneTotals
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.metrics_state import LANE_STATES
from coordinator.telemetry.stats import Timeline
from laneproto.v1 import lane_pb2

MODEL = ModelView("m", "arch", b"\x07" * 32, 256, 4096, (2,), "q4g64", 1 << 20, 4096)
OWNER = OwnerStatus("ready", 100, 100, "adopted", b"\x07" * 32, b"\x01" * 16)


def state(**changes) -> State:
    counters = lane_pb2.Counters(**{name: number for number, name in enumerate(FIELDS, 1)})
    lanes = [
        LaneView(
            f"lane-{k}", "", "ready", b"i", MODEL, k, 9, device="cpu", counters=counters, decode_ns=((1, 7 * 10**6),)
        )
        for k in range(2)
    ]
    totals = LaneTotals()
    totals.look(lanes)
    base = State(lanes, {lane.name: totals.of(lane.name) for lane in lanes}, {"lane-1": 1}, 3, 256, MODEL, OWNER, 4)
    return replace(base, **changes)


def busy_metrics() -> Metrics:
    metrics, now = Metrics(), [0.0]
    for door in ("http", "grpc"):
        timeline = Timeline(metrics, door, lambda: now[0])
        timeline.accepted(5)
        now[0] += 1.0
        timeline.tokens([lane_pb2.Token(stamp_ns=10**9), lane_pb2.Token(stamp_ns=10**9 + 20_000_000)])
        timeline.ended("length")
    metrics.request("http", "queue_full")
    return metrics


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in parse(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_values_are_what_happened():
    seen = values(busy_metrics().render(state()))

    def value(metric, **labels):
        return seen[(metric, tuple(sorted(labels.items())))]

    assert value("expressway_requests_total", door="http", outcome="length") == 1
    assert value("expressway_requests_total", door="http", outcome="stop") == 0
    assert value("expressway_requests_total", door="http", outcome="queue_full") == 1
    assert value("expressway_prompt_tokens_total") == 10
    assert value("expressway_generated_tokens_total") == 4
    assert value("expressway_inter_token_seconds_count") == 2
    assert value("expressway_inter_token_seconds_sum") == pytest.approx(0.04)
    assert value("expressway_time_to_first_token_seconds_bucket", le="1.0") == 2
    assert value("expressway_time_to_first_token_seconds_bucket", le="0.5") == 0
    assert value("expressway_queue_requests") == 3
    assert value("expressway_lane_state", lane="lane-0", state="ready") == 1
    assert value("expressway_lane_state", lane="lane-1", state="busy") == 1
    assert value("expressway_lane_state", lane="lane-1", state="ready") == 0
    assert value("expressway_lane_restarts_total", lane="lane-1") == 1
    number = {name: index for index, name in enumerate(FIELDS, 1)}
    assert value("expressway_lane_expert_lookups_total", lane="lane-0", source="region") == number["expert_misses"]
    assert value("expressway_lane_busy_seconds_total", lane="lane-0", phase="decode") == number["decode_ns"] * 1e-9
    assert value("expressway_lane_cache_used_bytes", lane="lane-0") == number["cache_used_bytes"]
    assert value("expressway_lane_drafts_total", lane="lane-0", place="2") == number["drafts_at_2"]
    assert value("expressway_lane_drafts_accepted_total", lane="lane-0", place="3") == number["drafts_right_at_3"]
    assert value("expressway_lane_decode_window_seconds", lane="lane-1", rows="1") == pytest.approx(0.007)
    assert value("expressway_region_bytes") == 100
    assert value("expressway_owner_up") == 1
    assert value("expressway_owner_restarts_total") == 4
    assert value("expressway_region_info", fingerprint="07" * 32, generation="01" * 16, source="adopted") == 1
    assert value("expressway_model_info", name="m", architecture="arch", expert_format="q4g64", fingerprint="07" * 32)


def test_every_counter_of_a_lane_is_shown():
    before = values(Metrics().render(state()))
    for field in FIELDS:
        lanes = state().lanes
        totals = {lane.name: {name: 10**6 * (name == field) for name in FIELDS} for lane in lanes}
        changed = values(Metrics().render(state(totals=totals)))
        other = [
            key for key, value in changed.items() if value not in (0, before[key]) and ("lane", "lane-1") in key[1]
        ]
        assert len([key for key in other if key[0] != "expressway_lane_running_requests"]) == 1, field


def test_times_of_steps_are_shown_by_kind():
    status = lane_pb2.LaneStatus(step_times=[
        lane_pb2.StepTimes(kind=lane_pb2.STEP_KIND_PREFILL, count=3, p99_ns=250_000_000),
        lane_pb2.StepTimes(kind=lane_pb2.STEP_KIND_DECODE, count=40, p99_ns=20_000_000),
        lane_pb2.StepTimes(kind=99, count=1, p99_ns=1),
    ])  # fmt: skip
    lanes = [replace(state().lanes[0], steps=step_times(status), resident_sequences=5)]
    seen = values(Metrics().render(state(lanes=lanes)))
    assert {key: value for key, value in seen.items() if "_step" in key[0]} == {
        ("expressway_lane_steps_total", (("kind", "prefill"), ("lane", "lane-0"))): 3,
        ("expressway_lane_steps_total", (("kind", "decode"), ("lane", "lane-0"))): 40,
        ("expressway_lane_step_p99_seconds", (("kind", "prefill"), ("lane", "lane-0"))): 0.25,
        ("expressway_lane_step_p99_seconds", (("kind", "decode"), ("lane", "lane-0"))): 0.02,
    }
    assert seen[("expressway_lane_resident_sequences", (("lane", "lane-0"),))] == 5


def test_routers_find_the_same_figures_under_the_names_they_know():
    lanes = state().lanes
    totals = {
        lane.name: {**dict.fromkeys(FIELDS, 0), "prompt_tokens": 60, "reused_tokens": 40, "state_used_bytes": used,
                    "state_budget_bytes": 100}
        for lane, used in zip(lanes, (10, 40), strict=True)
    }  # fmt: skip
    seen = values(busy_metrics().render(state(totals=totals, running={"lane-0": 2, "lane-1": 1}, queued=7)))
    engine = (("engine", "0"), ("model_name", "m"))
    told = {name: value for (name, labels), value in seen.items() if labels == engine}
    for name, value in {
        "num_requests_running": 3, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.25, "gpu_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 200, "prefix_cache_hits_total": 80, "gpu_prefix_cache_queries_total": 200,
        "gpu_prefix_cache_hits_total": 80, "prompt_tokens_total": 10, "generation_tokens_total": 4,
        "time_to_first_token_seconds_count": 2, "time_to_first_token_seconds_sum": 2.0,
        "inter_token_latency_seconds_count": 2, "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
    }.items():  # fmt: skip
        assert told[f"vllm:{name}"] == value, name
    ended = tuple(sorted((*engine, ("finished_reason", "length"))))
    assert seen[("vllm:request_success_total", ended)] == 2
    le = tuple(sorted((*engine, ("le", "1.0"))))
    assert seen[("vllm:time_to_first_token_seconds_bucket", le)] == 2
    assert not [key for key in values(Metrics().render(state(model=None))) if key[0].startswith("vllm:")]


def test_what_is_not_known_has_no_sample():
    seen = values(Metrics().render(state(lanes=[], totals={}, running={}, model=None, owner=None)))
    names = {name for name, _ in seen}
    assert not names & {"expressway_region_bytes", "expressway_region_info", "expressway_model_info"}
    assert seen[("expressway_owner_up", ())] == 0


def test_regions_of_other_hosts_have_their_names():
    filling = OwnerStatus("filling", 30, 100)
    regions = (RegionView("", None, 0), RegionView("b", filling, 0), RegionView("c", None, 0))
    seen = values(Metrics().render(state(regions=regions)))
    assert seen[("expressway_owner_up", ())] == 1  # as it was asked now
    assert seen[("expressway_owner_up", (("host", "b"),))] == 1
    assert seen[("expressway_owner_up", (("host", "c"),))] == 0
    assert seen[("expressway_region_filled_bytes", (("host", "b"),))] == 30
    assert seen[("expressway_region_state", (("host", "b"), ("state", "filling")))] == 1
    assert not [key for key in seen if key[0].startswith("expressway_region") and ("host", "c") in key[1]]


BASE_UNITS = ("_seconds", "_bytes", "_total", "_info", "_requests", "_state", "_up", "_sequences")


def test_the_text_keeps_the_rules_that_promtool_checks():
    text = busy_metrics().render(state()).decode()
    helps, types, current = {}, {}, ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, said = line.split(" ", 3)
            assert name not in helps
            helps[name] = said
            assert said.endswith(".") or name.startswith("process_")
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            assert name not in types
            types[name], current = kind, name
            assert name in helps
        else:
            name = re.match(r"[a-z_:0-9]+", line).group()
            assert re.fullmatch(re.escape(current) + "(_bucket|_sum|_count)?", name), line  # under its own heading
            assert (name == current) == (types[current] != "histogram")
    assert set(helps) == set(types)
    for name, kind in types.items():
        assert name.startswith(("expressway_", "process_", "vllm:"))
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ns|ms|milliseconds|microseconds|kib|mib|created|counter|gauge|histogram)(_|$)", name)
        assert name.endswith(BASE_UNITS) or name.startswith(("process_", "vllm:")), name
        assert kind != "untyped"
        assert kind == "counter" or not name.endswith(("_count", "_sum", "_bucket"))
    for family in parse(text):
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)
            assert not set(sample.labels) & {"session", "tenant", "request_id", "prompt", "job", "instance"}


def test_labels_are_bounded_whatever_happens():
    metrics = Metrics()
    for number in range(1000):
        metrics.request("http", f"made up {number}")
    every_error = [each.code for each in vars(errors).values() if isinstance(each, type)]
    for code in every_error:
        metrics.request("grpc", code)
    seen = values(metrics.render(state()))
    outcomes = {dict(labels)["outcome"] for name, labels in seen if name == "expressway_requests_total"}
    assert outcomes <= {*every_error, "stop", "length", "cancelled", "other"}
    assert "other" in outcomes
    lanes = [each for each in seen if each[0].startswith("expressway_lane_")]
    assert len(lanes) == 2 * (len(FIELDS) + len(LANE_STATES) + 5)  # running, restarts, device, resident, window


def test_nothing_is_registered_globally():
    before = set(REGISTRY._names_to_collectors)
    first, second = busy_metrics(), Metrics()
    assert set(REGISTRY._names_to_collectors) == before
    key = ("expressway_generated_tokens_total", ())
    assert (values(first.render(state()))[key], values(second.render(state()))[key]) == (4, 0)


def test_an_end_is_recorded_once_and_clocks_that_go_back_harm_nothing():
    metrics = Metrics()
    timeline = Timeline(metrics, "grpc", lambda: 0.0)
    timeline.tokens([lane_pb2.Token(stamp_ns=5), lane_pb2.Token(stamp_ns=3)])
    timeline.ended("stop")
    timeline.ended("cancelled")
    seen = values(metrics.render(state()))
    assert seen[("expressway_requests_total", (("door", "grpc"), ("outcome", "stop")))] == 1
    assert ("expressway_requests_total", (("door", "grpc"), ("outcome", "cancelled"))) not in seen
    assert seen[("expressway_inter_token_seconds_sum", ())] == 0


def test_the_guide_lists_exactly_what_there_is():
    guide = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    told = dict(re.findall(r"^\| `((?:expressway_|vllm:)\w+)(?:\{[\w,]+\})?` \| (\w+) \|", guide, re.MULTILINE))
    lanes = [replace(lane, steps=(StepTimes("decode", 1, 0.1),)) for lane in state().lanes]
    regions = [RegionView("b", OWNER, 0)]
    text = busy_metrics().render(state(lanes=lanes, regions=regions)).decode()
    there = dict(re.findall(r"^# TYPE ((?:expressway_|vllm:)\w+) (\w+)$", text, re.MULTILINE))
    assert told == there
    labels = {f"{name}{{{list_}}}" for name, list_ in re.findall(r"`([\w:]+)\{([\w,]+)\}`", guide)}
    for family in parse(text):
        for sample in family.samples:
            if sample.labels.keys() - {"le"}:
                base = re.sub("_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
                named = next(each for each in labels if each.startswith(f"{base}{{"))
                known = set(named.partition("{")[2].rstrip("}").split(","))
                assert known - {"host"} <= sample.labels.keys() - {"le"} <= known  # the coordinator's own has no host
