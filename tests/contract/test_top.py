"""`expressway top` against a real page, and against what is none."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from coordinator.cli.top import ANSWER_BYTES, curve, read_snapshot, view
from coordinator.config import Address
from coordinator.errors import CoordinatorError
from coordinator.page.snapshot import snapshot
from tests.contract.test_page import ASK, COMPLETIONS, watched
from tests.fakes.doors import until
from tests.fakes.lane import Script
from tests.unit.test_page_snapshot import full, moment


async def top(*words: str) -> tuple[int, str, str]:
    """`expressway top WORDS…` as a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", "top", *words, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def shown(now: dict, width: int = 140) -> str:
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(view(now))
    return captured.get()


def test_the_cache_map_and_what_is_kept_of_conversations():
    text = shown(snapshot(full()))
    assert "▁▅▆" in text  # nothing, a half and three quarters of three layers
    line = next(line for line in text.splitlines() if "parked" in line)
    assert line.split("  ")[0].strip() == "agent"
    assert "lane-0 128, lane-1 200, parked 192" in line


def test_a_narrow_terminal_keeps_the_names_of_lanes():
    now = snapshot(full())
    now["lanes"][0]["name"] = "build-2/lane-0"
    assert "build-2/lane-0" in shown(now, width=80)


async def test_a_pipe_gets_one_view_below_the_other(tmp_path: Path) -> None:
    async with watched(tmp_path) as seen:
        words = ("top", "--address", str(seen.page.address), "--every", "0.2")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator.cli", *words, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        views = 0
        async with asyncio.timeout(120):
            while views < 2:
                views += b"2 of 2 lanes serving" in await process.stdout.readline()
        process.terminate()
        await process.communicate()


async def test_once_in_a_terminal_and_as_json(tmp_path: Path) -> None:
    async with watched(tmp_path, script=Script(token_delay_s=0.02)) as seen:
        body = {**ASK, "max_tokens": 3500}
        task = asyncio.create_task(seen.cluster.post(COMPLETIONS, body, {"x-session-id": "an agent"}))
        await until(lambda: any(each.tokens for each in seen.cluster.doors.serving.journal.living.values()), 60)
        address = str(seen.page.address)
        code, out, err = await top("--address", address, "--once", "--json")
        assert (code, err) == (0, "")
        now = json.loads(out)
        assert (now["v"], [lane["name"] for lane in now["lanes"]]) == (2, ["lane-0", "lane-1"])
        code, out, err = await top("--address", address, "--once")
        assert (code, err) == (0, "")
        assert "2 of 2 lanes serving" in out
        assert "an agent: " in out
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, "not json", "what answers is no page"),
        (200, "[1]", "another version"),
        (200, '{"v": 1}', "another version"),
        (404, "{}", "HTTP 404"),
        (401, "", "EXPRESSWAY_API_KEY"),
        (200, " " * (ANSWER_BYTES + 1), "no page there"),
        (None, "", "refused"),
    ],
)
async def test_what_is_no_page_is_unreachable(unused_port: int, status: int | None, body: str, said: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status or 500, text=body)

    app = web.Application()
    app.router.add_get("/snapshot", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = unused_port
    if status is not None:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
    try:
        with pytest.raises(CoordinatorError, match=re.escape(said)) as caught:
            await asyncio.to_thread(read_snapshot, Address("127.0.0.1", port))
    finally:
        await runner.cleanup()
    assert caught.value.code == "unreachable"


@pytest.fixture
def unused_port(tmp_path: Path) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_shows_the_same_snapshot() -> None:
    text = shown(snapshot(full()))
    for told in (
        *("25.0 tokens/s written", "1 of 2 lanes serving", "busy", "dead", "90 % hit", "agent: 25 of 100 at most"),
        *("lane_lost", "anyone", "first token 3.0 s"),
    ):
        assert told in text, told
    assert "no model yet" in shown(snapshot(moment()))


def test_it_names_the_regions_of_other_hosts() -> None:
    now = snapshot(full())
    other = {"host": "build-2", "state": "filling", "bytes": 10, "filled_bytes": 3, "owner_restarts": 0}
    now["regions"] = [{**now["region"], "host": ""}, other]
    assert f"region {now['region']['state']}   build-2 filling" in shown(now)


def test_text_of_others_is_text() -> None:
    now = snapshot(full())
    now["lanes"][0]["work"][0]["session"] = "[red]\x1b]0;owned\x07:smile:"
    text = shown(now)
    assert "[red]?]0;owned?:smile:" in text
    assert "\x1b" not in text


def test_a_curve_of_blocks() -> None:
    assert curve([99, *[0] * 5, *[5] * 5, *[8, 12, 10, 9, 11]]) == "▁▅█"
    assert curve([0.0] * 60) == "▁" * 12
    assert curve([]) == ""
