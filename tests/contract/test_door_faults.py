"""What clients of the HTTP door see when lanes die, clients leave, or there is no room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import http_exceptions

from coordinator import limits
from coordinator.doors.listen import ProtocolLog
from laneproto.v1 import lane_pb2
from tests.fakes.doors import VOCAB_SIZE, Cluster, events_of, open_doors, until
from tests.fakes.lane import Script, token_at

COMPLETIONS = "/v1/completions"
CANCELLED = lane_pb2.FINISH_REASON_CANCELLED
ENDLESS = Script(token_delay_s=0.005)


def ask(prompt: int = 5, max_tokens: int = 3000, **more: Any) -> dict[str, Any]:
    return {"prompt": [prompt], "max_tokens": max_tokens, **more}


async def first_bytes(response: aiohttp.ClientResponse) -> bytes:
    """The stream has begun."""
    assert response.status == 200
    first = await response.content.readany()
    assert first
    return first


def expected_text(cluster: Cluster, prompt: int, count: int) -> str:
    """What lanes make up, as text."""
    detokenizer = cluster.doors.serving.text.detokenizer()
    pieces = [detokenizer.feed(token_at([prompt], index, VOCAB_SIZE)) for index in range(count)]
    return "".join(pieces) + detokenizer.flush()


def dispatched(cluster: Cluster) -> int:
    return sum(cluster.doors.serving.dispatcher.running(lane.name) for lane in cluster.lanes)


@pytest.mark.parametrize("roster_knows", [True, False])
async def test_a_lane_that_dies_mid_stream_is_replaced_and_the_other_stream_goes_on(
    tmp_path: Path, roster_knows: bool
) -> None:
    async with (
        open_doors(tmp_path, script=ENDLESS) as cluster,
        cluster.http.post(COMPLETIONS, json=ask(max_tokens=90, stream=True)) as doomed,
        cluster.http.post(COMPLETIONS, json=ask(6, 80, stream=True)) as other,
    ):
        first = await first_bytes(doomed)
        assert doomed.headers["x-expressway-lane"] == "lane-0"
        if roster_knows:
            cluster.roster.lose("lane-0")
        await cluster.lanes[0].crash()
        for body, prompt, count in (
            ((first + await doomed.read()).decode(), 5, 90),
            ((await other.read()).decode(), 6, 80),
        ):
            *events, done = events_of(body)
            assert done == "[DONE]"
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert not any("error" in event for event in events)
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == expected_text(cluster, prompt, count)
        assert cluster.lanes[1].requests[-1].replayed_tokens > 0


async def test_lanes_that_die_mid_stream_one_after_the_other_are_one_error(tmp_path: Path) -> None:
    crash = Script(fault="crash", fault_after=2)
    async with (
        open_doors(tmp_path, lanes=3, script=crash) as cluster,
        cluster.http.post(COMPLETIONS, json=ask(stream=True)) as doomed,
    ):
        *_, last = events_of((await doomed.read()).decode())
        assert set(last) == {"error"}  # the last event; no [DONE] after it
        assert last["error"]["code"] == "lane_lost"
        assert last["error"]["type"] == "server_error"


async def test_a_lane_that_dies_under_a_whole_answer(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster:
        waiting = asyncio.create_task(cluster.post(COMPLETIONS, ask()))
        await until(lambda: cluster.lanes[0].counters.generated_tokens > 3)
        cluster.roster.lose("lane-0", "quarantined")
        await cluster.lanes[0].crash()
        status, headers, body = await waiting
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_lane", "1")
        # and when it is back, it serves again
        await cluster.lanes[0].restart(Script())
        await cluster.roster.returned("lane-0")
        assert (await cluster.post(COMPLETIONS, ask(max_tokens=2)))[0] == 200


async def test_an_error_of_the_lane_is_an_error(tmp_path: Path) -> None:
    script = Script(fault="error", fault_after=3, error_code="non_finite_logits")
    async with open_doors(tmp_path, lanes=1, script=script) as cluster:
        status, _, body = await cluster.post(COMPLETIONS, ask())
        assert (status, body["error"]["code"]) == (500, "lane_failed")
        assert "non_finite_logits" in body["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_lane(tmp_path: Path, stream: bool) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster, aiohttp.ClientSession() as leaving:
        post = leaving.post(f"http://{cluster.doors.http}{COMPLETIONS}", json=ask(stream=stream))
        request = asyncio.create_task(post.__aenter__())
        await until(lambda: cluster.lanes[0].counters.generated_tokens > 3)
        if stream:
            response = await request
            await first_bytes(response)
            response.close()
        else:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await leaving.close()
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED])
        assert cluster.lanes[0].counters.generated_tokens < 1000
        await until(lambda: dispatched(cluster) == 0)
        assert (await cluster.post(COMPLETIONS, ask(max_tokens=2)))[0] == 200


async def test_a_client_that_leaves_the_queue_is_never_sent_to_a_lane(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster, aiohttp.ClientSession() as leaving:
        running = asyncio.create_task(cluster.post(COMPLETIONS, ask(max_tokens=40)))
        await until(lambda: dispatched(cluster) == 1)
        post = leaving.post(f"http://{cluster.doors.http}{COMPLETIONS}", json=ask(7))
        queued = asyncio.create_task(post.__aenter__())
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        await leaving.close()
        await until(lambda: cluster.doors.serving.dispatcher.queued == 0)
        assert (await running)[0] == 200
        assert [list(sent.prompt_ids) for sent in cluster.lanes[0].requests] == [[5]]


async def test_a_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS, queue_requests=1) as cluster:
        tasks = [asyncio.create_task(cluster.post(COMPLETIONS, ask(max_tokens=60)))]
        await until(lambda: dispatched(cluster) == 1)
        tasks.append(asyncio.create_task(cluster.post(COMPLETIONS, ask(max_tokens=1))))
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        for stream in (True, False):
            status, headers, body = await cluster.post(COMPLETIONS, ask(stream=stream))
            assert (status, body["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(headers["retry-after"]) <= limits.RETRY_AFTER_MAX_S
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_full_server_still_tells_what_is_wrong_with_a_small_body(tmp_path: Path) -> None:
    """Of a larger one, or one of unknown length, not a byte is read."""

    async def told(body: bytes | AsyncIterator[bytes]) -> tuple[int, str]:
        headers = {"content-type": "application/json"}
        async with cluster.http.post(COMPLETIONS, data=body, headers=headers) as response:
            return response.status, (await response.json())["error"]["code"]

    async def in_chunks() -> AsyncIterator[bytes]:
        yield b"{"

    async with open_doors(tmp_path, lanes=1, queue_requests=0) as cluster:
        wrong = b'{"prompt": 5'
        assert await told(wrong.ljust(limits.SMALL_BODY_BYTES)) == (400, "invalid_request")
        assert await told(wrong.ljust(limits.SMALL_BODY_BYTES + 1)) == (429, "queue_full")
        assert await told(in_chunks()) == (429, "queue_full")
        assert await told(b"") == (400, "invalid_request")
        assert await told(b'{"prompt": "5"}') == (429, "queue_full")  # nothing is wrong with it: no room


async def test_without_lanes_503_and_while_one_may_come_the_request_waits(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=2) as cluster:
        cluster.roster.lose("lane-0", "quarantined")
        cluster.roster.lose("lane-1", "dead")
        waiting = asyncio.create_task(cluster.post(COMPLETIONS, ask(max_tokens=2)))
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        await cluster.roster.returned("lane-1")
        status, headers, _ = await waiting
        assert (status, headers["x-expressway-lane"]) == (200, "lane-1")
        waiting = asyncio.create_task(cluster.post(COMPLETIONS, ask(max_tokens=2000)))
        await until(lambda: dispatched(cluster) == 0)
        cluster.roster.lose("lane-1", "quarantined")
        await waiting
        for stream in (True, False):
            status, headers, body = await cluster.post(COMPLETIONS, ask(stream=stream))
            assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_lane", "1")


async def test_before_any_lane_was_ready(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=0) as cluster:
        assert (await cluster.get("/healthz"))[0] == 503
        for status, body in (await cluster.get("/v1/models"), (await cluster.post(COMPLETIONS, ask()))[::2]):
            assert (status, body["error"]["code"]) == (503, "no_lane")


async def test_closing_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster:
        async with cluster.http.post(COMPLETIONS, json=ask(stream=True)) as running:
            await first_bytes(running)
            closing = asyncio.create_task(cluster.doors.close())
            *_, last = events_of((await running.read()).decode())
            assert last["error"]["code"] == "closing"
        await closing
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED])


async def test_a_client_that_stopped_reading_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_STALL_S", 0.2)
    async with open_doors(tmp_path, lanes=1, script=Script(), context_tokens=1 << 20) as cluster:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(narrow, (cluster.doors.http.host, cluster.doors.http.port))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        body = '{"prompt":[5],"max_tokens":1000000,"stream":true,"logprobs":20}'
        fields = (f"Host: {cluster.doors.http}", "Content-Type: application/json", f"Content-Length: {len(body)}")
        writer.write("\r\n".join((f"POST {COMPLETIONS} HTTP/1.1", *fields, "", body)).encode())
        await reader.readuntil(b"\r\n\r\n")  # and nothing after it
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED], 20)
        await until(lambda: dispatched(cluster) == 0)
        assert cluster.lanes[0].counters.generated_tokens < 100_000
        writer.close()


async def test_a_client_that_reads_nothing_costs_a_lane_no_whole_answer(tmp_path: Path) -> None:
    """With the kernel's own buffers, 23,000 tokens were written for each."""
    async with open_doors(tmp_path, lanes=1, script=Script(), context_tokens=1 << 20) as cluster:
        writers = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(cluster.doors.http.host, cluster.doors.http.port, limit=1)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            body = '{"prompt":[5],"max_tokens":1000000,"stream":true}'
            fields = (f"Host: {cluster.doors.http}", "Content-Type: application/json", f"Content-Length: {len(body)}")
            writer.write("\r\n".join((f"POST {COMPLETIONS} HTTP/1.1", *fields, "", body)).encode())
            writers.append(writer)
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED] * 2, 60)
        assert cluster.lanes[0].counters.generated_tokens < 2 * 8_000
        assert (await cluster.post(COMPLETIONS, ask(max_tokens=2)))[0] == 200
        for writer in writers:
            writer.close()


async def test_nothing_of_a_prompt_or_an_answer_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        chat = {"messages": [{"role": "user", "content": "canary-7f3a"}], "max_tokens": 3, "stop": ["canary-9c1e"]}
        await cluster.post("/v1/chat/completions", chat)
        await cluster.post("/v1/chat/completions", {**chat, "tools": ["canary-5d22"]})
        await cluster.post(COMPLETIONS, {"prompt": "canary-1b44", "max_tokens": "canary-3e55"})
    logged = "".join(capsys.readouterr())
    assert "dispatched" in logged
    assert "canary" not in logged


@pytest.mark.parametrize(
    ("error", "event", "level"),
    [
        (ConnectionResetError("Cannot write to closing transport"), "client gone", "info"),
        (http_exceptions.BadStatusLine("GET secret"), "malformed request", "info"),
        (OSError("no"), "connection failed", "error"),
    ],
)
def test_what_is_logged_of_a_broken_connection(error: Exception, event: str, level: str) -> None:
    """A client that leaves between two words of its answer is no failure of ours, and no traceback."""
    with structlog.testing.capture_logs() as logged:
        ProtocolLog().exception("Error handling request", exc_info=error)
    (line,) = logged
    assert (line["event"], line["log_level"]) == (event, level)
    assert ("exc_info" in line) is (level == "error")
    assert "secret" not in str(line)
