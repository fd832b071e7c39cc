"""The page in Chromium, beside real doors on simulated lanes: it renders, lives, shows a death, and fits a phone.

With EXPRESSWAY_SCREENSHOTS=DIR the pictures of docs/page.md are made again on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.auth import Auth
from coordinator.fleet.lane_view import PrefixNews, RegionView, StepTimes
from coordinator.host.owner_status import OwnerStatus
from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from coordinator.tenants import ANYONE
from laneproto.chain import chain
from laneproto.v1 import lane_pb2
from shared_experts.descriptor_server import DescriptorServer
from shared_experts.handoff import RegionStatus
from tests.contract.test_keys import keys
from tests.contract.test_page import COMPLETIONS, Watched, watched
from tests.fakes.browser import Tab, browser
from tests.fakes.doors import until
from tests.fakes.lane import Script

pytestmark = pytest.mark.slow

GIB = 1 << 30
LANE_1 = "document.getElementById('lane-lane-1')"
SHOTS = os.environ.get("EXPRESSWAY_SCREENSHOTS")
REGION = RegionStatus("ready", "built", 27 * GIB, 27 * GIB, b"\x07" * 32, b"\x01" * 16, 1)


def made_up(lane: int, n: int, prompt_tokens: int) -> lane_pb2.Counters:
    """What a lane might have counted after n tokens."""
    return lane_pb2.Counters(
        expert_hits=n * (230 - 9 * lane),
        expert_misses=n * (26 + 9 * lane),
        expert_hit_bytes=n * 310_000_000,
        expert_miss_bytes=n * 41_000_000,
        ngram_rows=n * 8,
        ngram_cache_hits=n * 5,
        ngram_prefetch_hits=n * 2,
        ngram_read_bytes=n * 24_576,
        drafts_at_1=n * 2 // 3,
        drafts_right_at_1=n // 2,
        reused_tokens=prompt_tokens * 6,
        checkpoints=2 + n // 40,
        cache_budget_bytes=20 * GIB,
        cache_used_bytes=min(20 * GIB, (17 + lane) * GIB + n * (1 << 18)),
        state_budget_bytes=4 * GIB,
        state_used_bytes=min(3 * GIB, (1 + lane) * GIB // 2 + n * (1 << 17)),
    )


async def counting(seen: Watched) -> None:
    """Lanes tell counters that go with the tokens they made up."""
    while True:
        for number, lane in enumerate(seen.cluster.lanes):
            lane.counters.MergeFrom(made_up(number, lane.counters.generated_tokens, lane.counters.prompt_tokens))
        seen.cluster.roster.hear(
            steps=(StepTimes("decode", 1, 0.041), StepTimes("prefill", 1, 0.6)),
            resident_sequences=3,
            cached_experts=tuple(60 + 9 * (layer * 29 % 48) for layer in range(49)),
            layer_experts=512,
        )
        await asyncio.sleep(0.2)


def prompt_of(tokens: int) -> list[int]:
    """Of the agent that wants so many tokens."""
    return [tokens % 256] * 3 + [5, 6, 7] * 400


def kept(seen: Watched, lane: str, prompt: list[int]) -> None:
    """The lane has the whole prompt in its memory, and most of it is parked."""
    chains = chain(prompt, ANYONE.salt)
    prefixes = [Prefix(chains[-1], len(prompt)), Prefix(chains[-3], 64 * (len(chains) - 2), parked=True)]
    fake = next(each for each in seen.cluster.lanes if each.name == lane)
    seen.cluster.roster.tell(PrefixNews(Seat(lane, fake.incarnation), prefixes, [], anew=False))


async def agent(seen: Watched, name: str, tokens: int) -> None:
    """One that asks again and again."""
    while True:
        body = {"prompt": prompt_of(tokens), "max_tokens": tokens, "temperature": 0}
        await seen.cluster.post(COMPLETIONS, body, {"x-session-id": name})


@contextlib.asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Watched, Tab]]:
    """A page of two lanes, and a browser on it that has had its first snapshot."""
    (tmp_path / "sockets").mkdir()
    (tmp_path / "profile").mkdir()
    script = Script(token_delay_s=0.035, prefill_delay_s=0.8)
    model = {"model_name": "Qwen3.8-Flash-Next", "context_tokens": 262_144}
    async with watched(tmp_path / "sockets", script=script, **model) as seen:
        with DescriptorServer(tmp_path / "sockets" / "owner.sock", lambda: (REGION, None)):
            async with browser(tmp_path / "profile") as tab:
                ticking = asyncio.create_task(counting(seen))
                try:
                    await tab.open(f"http://{seen.page.address}/")
                    await tab.until("document.getElementById('link')?.dataset.state === 'live'")
                    yield seen, tab
                    assert tab.complaints == []
                finally:
                    ticking.cancel()
                    await asyncio.gather(ticking, return_exceptions=True)


async def shoot(tab: Tab, name: str) -> None:
    if SHOTS:
        await tab.shoot(Path(SHOTS) / name)


def state_of(lane: str) -> str:
    return f"document.getElementById('lane-{lane}').dataset.state"


async def test_it_renders_lives_and_shows_a_death_and_a_return(tmp_path: Path) -> None:
    async with opened(tmp_path) as (seen, tab):
        assert await tab.ask("[...document.querySelectorAll('h3')].map((each) => each.textContent)") == [
            "lane-0", "lane-1",
        ]  # fmt: skip
        assert await tab.ask("document.getElementById('t-lanes').textContent") == "2 of 2"
        assert "Qwen3.8-Flash-Next" in await tab.ask("document.getElementById('model').textContent")
        await tab.until(f"{state_of('lane-0')} === 'ready' && document.querySelectorAll('.bars > div').length > 2")
        await shoot(tab, "page-idle.png")
        foot = "document.getElementById('foot').textContent"
        assert "region ready, 27" in await tab.ask(foot)
        other = RegionView("build-2", OwnerStatus("filling", 3 * GIB, 10 * GIB), 0)
        seen.cluster.roster.known_regions = [RegionView("", None, 0), other]
        await tab.until(f"{foot}.includes('region ready, 27') && {foot}.includes('region of build-2 filling 30')")

        agents = [asyncio.create_task(agent(seen, f"agent-{name}", n)) for name, n in (("docs", 900), ("tests", 700))]
        await tab.until(f"{state_of('lane-0')} === 'busy' && {state_of('lane-1')} === 'busy'")
        await tab.until("Number(document.getElementById('t-rate').textContent) > 20")
        await tab.until("document.querySelector('.stroke').getAttribute('d').length > 20")  # the curve has begun
        assert await tab.ask("[...document.querySelectorAll('.who')].map((each) => each.textContent).sort()") == [
            "agent-docs", "agent-tests",
        ]  # fmt: skip
        for name, tokens in (("lane-0", 900), ("lane-1", 700)):
            kept(seen, name, prompt_of(tokens))
        await tab.until("document.getElementById('talk-rows').textContent.includes('lane-0 100 % · parked 85 %')")
        assert await tab.ask("document.querySelectorAll('#lane-lane-0 .map rect').length") == 49
        before = await tab.ask("document.querySelector('.does').textContent")
        await tab.until(f"document.querySelector('.does').textContent !== {before!r}")  # without a reload
        if SHOTS:
            await tab.until("document.querySelector('.stroke').getAttribute('d').length > 280")
        await shoot(tab, "page-two-agents.png")

        agents.append(asyncio.create_task(agent(seen, "agent-review", 300)))
        await until(lambda: seen.cluster.doors.serving.dispatcher.queued == 1, 60)
        await tab.until("document.getElementById('queue-rows').textContent.includes('agent-review')")
        await seen.cluster.lanes[1].crash()
        seen.cluster.roster.lose("lane-1")
        await tab.until(f"{state_of('lane-1')} === 'dead'")
        assert await tab.ask("document.getElementById('alarm').textContent") == "lane-1 is down."
        assert await tab.ask("document.getElementById('alarm').hidden") is False
        assert "dead" in await tab.ask(f"{LANE_1}.querySelector('.chip').textContent")
        # shown within two seconds of being known, by the page's own account
        assert await tab.ask("Number.parseInt(document.querySelector('#changes time').textContent)") < 2
        await tab.until(
            "document.querySelectorAll('#queue-rows tr').length === 2"
        )  # its request waits for another lane
        await shoot(tab, "page-a-lane-dies.png")

        await seen.cluster.lanes[1].restart()
        await seen.cluster.roster.returned("lane-1")
        await tab.until("document.getElementById('alarm').hidden")
        await tab.until("document.body.textContent.includes('went on after its lane was lost')")
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


async def test_it_fits_a_phone_and_says_when_the_connection_is_lost(tmp_path: Path) -> None:
    async with opened(tmp_path) as (seen, tab):
        for width, dark in ((360, False), (360, True), (768, False), (1600, True)):
            await tab.look(width=width, height=740, dark=dark)
            assert await tab.ask("document.documentElement.scrollWidth") <= width, f"{width} scrolls sideways"
            await shoot(tab, f"look-{width}{'-dark' if dark else ''}.png")
        ground = await tab.ask("getComputedStyle(document.body.parentElement).backgroundColor")
        await tab.look(width=1600, height=740, dark=False)
        assert await tab.ask("getComputedStyle(document.body.parentElement).backgroundColor") != ground
        assert await tab.ask("document.querySelectorAll('h1').length") == 1
        assert await tab.ask("document.querySelectorAll('[role=img]:not([aria-label])').length") == 0
        # text of a client stays text
        hostile = "<img src=x onerror=alert(1)>"
        script = Script(token_delay_s=0.02)
        for lane in seen.cluster.lanes:
            lane.script = script
        task = asyncio.create_task(
            seen.cluster.post(COMPLETIONS, {"prompt": [5], "max_tokens": 4000}, {"x-session-id": hostile})
        )
        await tab.until("document.querySelectorAll('.who').length === 1")
        assert await tab.ask("document.querySelector('.who').textContent") == hostile
        assert await tab.ask("document.images.length") == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert tab.complaints == []
        await seen.page.close()
        await tab.until("document.getElementById('link').dataset.state === 'lost'")
        tab.complaints.clear()  # that the connection was refused


async def test_with_keys_the_browsers_password_is_one(tmp_path: Path) -> None:
    key = keys("add", "ann", path=tmp_path / "tenants.json")
    for name in ("sockets", "profile"):
        (tmp_path / name).mkdir()
    async with (
        watched(tmp_path / "sockets", auth=Auth(tmp_path / "tenants.json")) as seen,
        browser(tmp_path / "profile") as tab,
    ):
        await tab.open(f"http://me:{key}@{seen.page.address}/")
        await tab.until("document.getElementById('link')?.dataset.state === 'live'")  # style, script and stream as well
        assert await tab.ask("document.querySelectorAll('.lane').length") == 2
        assert tab.complaints == []
