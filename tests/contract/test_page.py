"""`/metrics` over a real socket, beside real doors on simulated lanes: what it says is what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.config import Address
from coordinator.doors.page import Page, start_page
from coordinator.errors import BadAddress
from coordinator.telemetry.metrics import CONTENT_TYPE, Metrics
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.handoff import RegionStatus
from tests.fakes.doors import Cluster, open_doors, until
from tests.fakes.lane import Script

COMPLETIONS = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4}


@dataclass
class Watched:
    cluster: Cluster
    page: Page

    async def get(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        async with (
            aiohttp.ClientSession(f"http://{self.page.address}") as http,
            http.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}) as r,
        ):
            return r.status, {name.lower(): value for name, value in r.headers.items()}, await r.text()

    async def read(self) -> dict[str, float]:
        """Samples by name, with their labels (but le) in brackets."""
        self.cluster.roster.hear()
        status, headers, text = await self.get()
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(value for _, value in sorted(sample.labels.items()))
                found[f"{sample.name}[{labels}]" if labels else sample.name] = sample.value
        return found


@contextlib.asynccontextmanager
async def watched(directory: Path, **options) -> AsyncIterator[Watched]:
    metrics = Metrics()
    async with open_doors(directory, recorder=metrics, **options) as cluster:
        address = Address("127.0.0.1", 0)
        page = await start_page(metrics, cluster.roster, cluster.doors.serving, directory / "owner.sock", address)
        try:
            yield Watched(cluster, page)
        finally:
            await page.close()


async def test_requests_tokens_and_times_are_counted_exactly(tmp_path: Path) -> None:
    async with watched(tmp_path, script=Script(token_delay_s=0.002)) as seen:
        for _ in range(3):
            status, _, _ = await seen.cluster.post(COMPLETIONS, ASK)
            assert status == 200
        await seen.cluster.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True,
                                                         "max_tokens": 2})  # fmt: skip
        await seen.cluster.generate(token_ids={"ids": [5, 6]}, max_tokens=3)
        chat_tokens = len(seen.cluster.lanes[1].requests[1].prompt_ids)
        now = await seen.read()
    assert now["expressway_requests_total[http,length]"] == 4
    assert now["expressway_requests_total[grpc,length]"] == 1
    assert now["expressway_generated_tokens_total"] == 3 * 4 + 2 + 3
    assert now["expressway_prompt_tokens_total"] == 3 * 3 + chat_tokens + 2
    for name in ("queue_wait", "time_to_first_token", "request_duration"):
        assert now[f"expressway_{name}_seconds_count"] == 5
        assert now[f"expressway_{name}_seconds_bucket[+Inf]"] == 5
    assert now["expressway_inter_token_seconds_count"] == 3 * 3 + 1 + 2
    assert now["expressway_inter_token_seconds_sum"] >= 12 * 0.002
    lanes = [now[f"expressway_lane_generated_tokens_total[lane-{k}]"] for k in range(2)]
    assert sum(lanes) == 17
    assert now["expressway_lane_state[lane-0,ready]"] == 1
    assert now["expressway_model_info[fake,f32," + "07" * 32 + ",fake]"] == 1


async def test_what_was_refused_is_counted_by_its_code(tmp_path: Path) -> None:
    async with watched(tmp_path, lanes=1, queue_requests=1, script=Script(token_delay_s=0.01)) as seen:
        cluster = seen.cluster
        await cluster.post(COMPLETIONS, {"prompt": []})
        await cluster.post(COMPLETIONS, {"prompt": "x", "n": "many"})
        await cluster.post(COMPLETIONS, {**ASK, "model": "another"})
        await cluster.get("/v1/nothing")
        await cluster.get(COMPLETIONS)  # no POST: no request for an answer
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(max_tokens=1)
        running = asyncio.create_task(cluster.post(COMPLETIONS, {**ASK, "max_tokens": 400}))
        await until(lambda: cluster.lanes[0].busy)
        waiting = asyncio.create_task(cluster.post(COMPLETIONS, ASK))
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        status, _, _ = await cluster.post(COMPLETIONS, ASK)
        assert status == 429
        now = await seen.read()
        assert now["expressway_queue_requests"] == 1
        assert now["expressway_lane_running_requests[lane-0]"] == 1
        assert now["expressway_lane_state[lane-0,busy]"] == 1
        for task in (waiting, running):  # clients that leave
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not cluster.lanes[0].busy)
        cluster.roster.set_state("lane-0", "quarantined")
        status, _, _ = await cluster.post(COMPLETIONS, ASK)
        assert status == 503
        now = await seen.read()
    outcomes = {name: value for name, value in now.items() if name.startswith("expressway_requests_total") and value}
    assert outcomes == {
        "expressway_requests_total[http,empty_prompt]": 1,
        "expressway_requests_total[http,invalid_request]": 1,
        "expressway_requests_total[http,model_not_found]": 1,
        "expressway_requests_total[grpc,invalid_request]": 1,
        "expressway_requests_total[http,queue_full]": 1,
        "expressway_requests_total[http,cancelled]": 2,
        "expressway_requests_total[http,no_lane]": 1,
    }
    assert now["expressway_request_duration_seconds_count"] == 0
    assert now["expressway_lane_state[lane-0,quarantined]"] == 1


async def test_a_stop_string_is_a_stop_and_a_failed_lane_is_lane_failed(tmp_path: Path) -> None:
    async with watched(tmp_path, lanes=1) as seen:
        text = (await seen.cluster.post(COMPLETIONS, {**ASK, "max_tokens": 30}))[2]["choices"][0]["text"]
        stop = next(char for char in text if char.isascii() and char.isprintable())
        await seen.cluster.post(COMPLETIONS, {**ASK, "max_tokens": 30, "stop": [stop]})
        await until(lambda: not seen.cluster.lanes[0].busy)
        seen.cluster.lanes[0].script_next(fault="error", fault_after=1)
        for stream in (False, True):
            await seen.cluster.post(COMPLETIONS, {**ASK, "stream": stream})
            await until(lambda: not seen.cluster.lanes[0].busy)
        now = await seen.read()
    assert now["expressway_requests_total[http,length]"] == 1
    assert now["expressway_requests_total[http,stop]"] == 1
    assert now["expressway_requests_total[http,lane_failed]"] == 2


async def test_lane_counters_go_on_across_a_restart_of_the_lane(tmp_path: Path) -> None:
    async with watched(tmp_path, lanes=1) as seen:
        roster, lane = seen.cluster.roster, seen.cluster.lanes[0]
        await seen.cluster.post(COMPLETIONS, ASK)
        roster.hear()
        roster.lose("lane-0")  # nobody asked for the metrics of this life
        now = await seen.read()
        assert now["expressway_lane_generated_tokens_total[lane-0]"] == 4
        assert now["expressway_lane_state[lane-0,dead]"] == 1
        await lane.restart()
        await roster.returned("lane-0")
        assert (await seen.read())["expressway_lane_generated_tokens_total[lane-0]"] == 4
        await seen.cluster.post(COMPLETIONS, ASK)
        assert lane.counters.generated_tokens == 4
        assert (await seen.read())["expressway_lane_generated_tokens_total[lane-0]"] == 8


async def test_the_region_is_asked_for_every_time(tmp_path: Path) -> None:
    status = [RegionStatus("filling", "", 30, 100, b"\x07" * 32, bytes(16), 1)]
    async with watched(tmp_path) as seen:
        assert (await seen.read())["expressway_owner_up"] == 0
        with DescriptorServer(tmp_path / "owner.sock", lambda: (status[0], None)):
            now = await seen.read()
            assert (now["expressway_owner_up"], now["expressway_region_state[filling]"]) == (1, 1)
            assert now["expressway_owner_restarts_total"] == 2  # what the roster says
            assert (now["expressway_region_filled_bytes"], now["expressway_region_bytes"]) == (30, 100)
            assert not any(name.startswith("expressway_region_info") for name in now)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("localhost:9999", True),
        ("LocalHost:1", True),
        ("127.0.0.1:8002", True),
        ("[::1]:8002", True),
        ("evil.example", False),
        ("evil.example:8002", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("[::1", False),
        ("localhost:port", False),
        ("192.0.2.1", False),
        ("", False),
    ],
)
async def test_only_names_of_this_host_are_answered(tmp_path: Path, host: str, allowed: bool) -> None:
    async with watched(tmp_path) as seen:
        status, headers, text = await seen.get(Host=host)
        assert status == (200 if allowed else 403)
        assert ("expressway_" in text) == allowed
        assert not [name for name in headers if name.startswith("access-control")]


async def test_methods_paths_and_headers(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen:
        status, headers, text = await seen.get(method="HEAD")
        assert (status, text, headers["content-type"]) == (200, "", CONTENT_TYPE)
        assert (headers["server"], headers["cache-control"]) == ("expressway", "no-store")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            status, headers, text = await seen.get(method=method, Origin="https://evil.example")
            assert status == 405
            assert not [name for name in headers if name.startswith("access-control")]
            assert "expressway_" not in text
        for path in ("/metrics/", "/index.html", "/assets/page.js", "/v1/models", "/healthz"):
            assert (await seen.get(path))[0] == 404
        assert (await seen.cluster.get("/metrics"))[0] == 404  # the doors do not have it


async def test_many_readers_at_once_and_a_taken_address(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen:
        answers = await asyncio.gather(*(seen.get() for _ in range(20)))
        assert {status for status, _, _ in answers} == {200}
        with pytest.raises(BadAddress, match="cannot listen there"):
            await start_page(Metrics(), seen.cluster.roster, seen.cluster.doors.serving, None, seen.page.address)
