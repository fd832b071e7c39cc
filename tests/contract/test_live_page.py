"""The page over a real socket, beside real doors on simulated lanes: its files, its snapshots, its stream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from coordinator import limits
from coordinator.auth import Auth
from coordinator.page import live
from tests.contract.test_keys import keys
from tests.contract.test_malformed_http import CASES, MESSAGES
from tests.contract.test_page import ASK, COMPLETIONS, Watched, watched
from tests.fakes.doors import until
from tests.fakes.lane import Script

LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def stream(seen: Watched, **headers: str) -> AsyncIterator[AsyncIterator[dict]]:
    """Its events as they come."""
    async with (
        aiohttp.ClientSession(f"http://{seen.page.address}") as http,
        http.get("/events", headers={name.replace("_", "-"): value for name, value in headers.items()}) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"

        async def events() -> AsyncIterator[dict]:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

        async with asyncio.timeout(LIMIT_S):
            yield events()


async def first_that(events: AsyncIterator[dict], condition) -> dict:
    async for event in events:
        if condition(event):
            return event
    raise AssertionError("the stream ended before")


async def test_the_page_is_its_own_three_files_and_loads_nothing_else(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen:
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            status, headers, text = await seen.get(path)
            assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            assert headers["cache-control"] == "no-store"
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none';")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert not re.search(r"https?://(?!www\.w3\.org/)", text)  # no address of anybody else
            if path == "/":
                assert not re.search(r"<script(?! src=\"/page\.js\")|\sstyle=|\son\w+=", text)
        script = (await seen.get("/page.js"))[2]
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|import\(", script)
        status, _, text = await seen.get("/", method="HEAD")
        assert (status, text) == (200, "")


async def test_a_snapshot_says_what_is_at_work(tmp_path: Path) -> None:
    async with watched(tmp_path, lanes=1, script=Script(token_delay_s=0.02)) as seen:
        cluster = seen.cluster
        tasks = [
            asyncio.create_task(cluster.post(COMPLETIONS, {**ASK, "max_tokens": 3000}, {"x-session-id": f"agent {k}"}))
            for k in range(2)
        ]
        await until(lambda: cluster.lanes[0].busy and cluster.doors.serving.dispatcher.queued == 1, LIMIT_S)
        await until(lambda: any(record.tokens for record in cluster.doors.serving.journal.living.values()), LIMIT_S)
        status, headers, text = await seen.get("/snapshot")
        assert (status, headers["content-type"]) == (200, "application/json; charset=utf-8")
        now = json.loads(text)
        (lane,) = now["lanes"]
        (work,) = lane["work"]
        (group,) = now["queue"]["groups"]
        assert (lane["state"], work["phase"], work["max_tokens"], work["prompt_tokens"]) == ("busy", "writing", 3000, 3)
        assert {work["session"], group["session"]} == {"agent 0", "agent 1"}
        assert (now["queue"]["waiting"], now["totals"]["running"]) == (1, 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not cluster.doors.serving.journal.living, LIMIT_S)
        now = json.loads((await seen.get("/snapshot"))[2])
        assert (now["lanes"][0]["work"], now["totals"]["cancelled"], now["totals"]["failed"]) == ([], 2, 0)


async def test_a_lanes_death_and_return_come_over_the_stream(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen, stream(seen) as events:
        first = await anext(events)
        assert [lane["state"] for lane in first["lanes"]] == ["ready", "ready"]
        seen.cluster.roster.lose("lane-1")
        now = await first_that(events, lambda event: event["lanes"][1]["state"] == "dead")
        assert (now["totals"]["lanes_serving"], now["lanes"][0]["state"]) == (1, "ready")
        assert now["changes"][0] | {"ago_s": 0} == {
            "ago_s": 0, "lane": "lane-1", "before": "ready", "after": "dead",
        }  # fmt: skip
        assert 0 <= now["changes"][0]["ago_s"] < LIMIT_S
        await seen.cluster.roster.returned("lane-1")
        await first_that(events, lambda event: event["lanes"][1]["state"] == "ready")


async def test_work_shows_up_and_goes_without_any_change_of_lanes(tmp_path: Path) -> None:
    async with watched(tmp_path, lanes=1, script=Script(token_delay_s=0.02)) as seen, stream(seen) as events:
        task = asyncio.create_task(seen.cluster.post(COMPLETIONS, {**ASK, "max_tokens": 200}))
        now = await first_that(events, lambda event: event["totals"]["tokens_per_s"] > 0)
        assert now["lanes"][0]["tokens_per_s_curve"]
        await task
        now = await first_that(events, lambda event: event["totals"]["answers"] == 1)
        assert now["totals"]["first_token_s"] > 0


async def test_no_more_than_the_limit_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_SUBSCRIBERS", 3)
    async with watched(tmp_path) as seen, contextlib.AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(stream(seen)) for _ in range(3)]
        for events in readers:
            await anext(events)  # at the limit each has its events
        status, _, text = await seen.get("/events")
        assert status == 503
        assert "3 watch already" in text
        assert (await seen.get("/snapshot"))[0] == 200
        await stack.aclose()
        async with stream_when_there_is_room(seen) as events:  # places that were given back
            await anext(events)


@contextlib.asynccontextmanager
async def stream_when_there_is_room(seen: Watched) -> AsyncIterator[AsyncIterator[dict]]:
    async with asyncio.timeout(LIMIT_S):
        while (await probe(seen)) == 503:
            await asyncio.sleep(0.02)
    async with stream(seen) as events:
        yield events


async def probe(seen: Watched) -> int:
    async with aiohttp.ClientSession(f"http://{seen.page.address}") as http, http.get("/events") as answer:
        return answer.status


async def test_a_reader_that_stops_is_cut_off_and_others_go_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "WRITE_STALL_S", 0.2)
    monkeypatch.setattr(limits, "PAGE_PAUSE_S", 0.0)
    monkeypatch.setattr(live, "dump", lambda moment: json.dumps({"much": "x" * (4 << 20), "at_s": moment.now_s}))
    async with watched(tmp_path) as seen:
        host, port = seen.page.address.host, seen.page.address.port
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()  # and then nothing more
        async with asyncio.timeout(LIMIT_S):
            while seen.page._live._watchers:
                await asyncio.sleep(0.05)
        writer.close()
        monkeypatch.undo()
        async with stream(seen) as events:
            assert (await anext(events))["v"] == 2


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/events", "/snapshot"])
async def test_other_sites_get_neither_snapshot_nor_a_watchers_place(tmp_path: Path, site: str, path: str) -> None:
    async with watched(tmp_path) as seen:
        status, _, text = await seen.get(path, Sec_Fetch_Site=site)
        assert (status, "lanes" in text) == (403, False)
        assert (await seen.get("/snapshot", Sec_Fetch_Site="same-origin"))[0] == 200
        assert (await seen.get(path, Host="evil.example"))[0] == 403


def basic_of(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


async def test_once_there_are_keys_every_route_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    key = keys("add", "ann", path=file)
    basic = basic_of("anybody", key)
    (tmp_path / "s").mkdir()
    async with watched(tmp_path / "s", auth=Auth(file)) as seen:
        for path in ("/", "/page.css", "/page.js", "/snapshot", "/events", "/metrics", "/nothing"):
            for headers in ({}, {"Authorization": "Basic !"}, {"Authorization": f"Basic {key}"}, {"x_api_key": "no"},
                            {"Authorization": basic_of(key, "no")}):  # fmt: skip
                status, answered, text = await seen.get(path, **headers)
                assert (status, "lane" in text) == (401, False), (path, headers)
                assert answered["www-authenticate"].startswith('Basic realm="expressway"')
        for headers in ({"Authorization": f"Bearer {key}"}, {"x_api_key": key}, {"Authorization": basic}):
            assert (await seen.get("/snapshot", **headers))[0] == 200
        async with stream(seen, Authorization=basic) as events:
            assert (await anext(events))["v"] == 2
        assert (await seen.get("/", Host="evil.example", Authorization=basic))[0] == 403


async def test_streams_end_when_the_page_closes(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen, stream(seen) as events:
        await anext(events)
        closing = asyncio.create_task(seen.page.close())
        async for _ in events:
            pass
        await closing


async def test_a_snapshot_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(tmp_path) as seen, stream(seen) as events:
        await anext(events)
        failed = asyncio.Event()

        def broken(moment):
            failed.set()
            raise RuntimeError("broken")

        monkeypatch.setattr(live, "dump", broken)
        await failed.wait()
        monkeypatch.undo()
        assert (await anext(events))["v"] == 2


async def test_what_is_not_http_is_answered_in_a_few_words_of_ours(tmp_path: Path) -> None:
    """aiohttp's own answer quotes what it could not read, four bytes for one, and tells its version."""
    async with watched(tmp_path) as seen:
        for name, data in {**CASES, **MESSAGES, "bytes": b"\0secret" * 1000}.items():
            reader, writer = await asyncio.open_connection(seen.page.address.host, seen.page.address.port)
            writer.write(data)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            length = int(re.search(rb"(?i)content-length: ([0-9]+)", head)[1])
            body = await asyncio.wait_for(reader.readexactly(length), LIMIT_S)
            writer.close()
            assert b" 400 " in head.partition(b"\r\n")[0] or b" 403 " in head.partition(b"\r\n")[0], name
            assert b"\r\nServer: expressway\r\n" in head
            assert b"\r\nx-content-type-options: nosniff\r\n" in head
            assert b"secret" not in head + body
            assert len(body) < 100
        assert (await seen.get("/snapshot"))[0] == 200
