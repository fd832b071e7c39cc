from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from coordinator.errors import LaneBusy, LaneError, LaneFailed, LaneLost, LaneRejected, LaneTimeout
from coordinator.fleet import lane_client
from coordinator.fleet.lane_client import LaneAccepted, LaneClient, LaneFinished, LaneTokens
from coordinator.fleet.lane_view import ModelView, PrefixNews
from coordinator.fleet.roster import prefix_news
from coordinator.policy.affinity import Seat
from coordinator.policy.prefixes import Prefix
from laneproto.v1 import lane_pb2
from tests.fakes.doors import until
from tests.fakes.lane import FakeLane, Script, token_at


@contextlib.asynccontextmanager
async def lane_and_client(directory: Path, script: Script | None = None):
    async with FakeLane(directory / "lane.sock", script=script) as lane:
        client = LaneClient(lane.address, name="lane-0")
        try:
            yield lane, client
        finally:
            await client.close()


def wire(request_id: str = "r", max_tokens: int = 3) -> lane_pb2.GenerateRequest:
    return lane_pb2.GenerateRequest(request_id=request_id, prompt_ids=[5], max_tokens=max_tokens)


async def test_hello_and_the_view_of_a_model(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path) as (lane, client):
        hello = await client.hello()
        assert (hello.lane, hello.incarnation) == ("lane-0", lane.incarnation)
        assert ModelView.of(hello.model).to_wire() == lane.model


async def test_prefixes_as_they_are_and_as_they_change(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path) as (lane, client):
        lane.tell_prefix(b"a" * 16, 64, lane_pb2.PREFIX_PLACE_LIVE)
        seat, told = Seat("lane-0", lane.incarnation), []
        async with contextlib.aclosing(client.prefixes()) as events:
            async for event in events:
                told.append(prefix_news(seat, event, anew=not told))
                if len(told) == 1:
                    lane.tell_prefix(b"a" * 16, 64, None)
                    lane.tell_prefix(b"b" * 16, 128, lane_pb2.PREFIX_PLACE_PARKED)
                if len(told) == 3:
                    break
        assert told == [
            PrefixNews(seat, [Prefix(b"a" * 16, 64)], [], True),
            PrefixNews(seat, [], [Prefix(b"a" * 16, 64)], False),
            PrefixNews(seat, [Prefix(b"b" * 16, 128, parked=True)], [], False),
        ]


async def test_another_protocol_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lane_and_client(tmp_path) as (_, client):
        monkeypatch.setattr(lane_client, "PROTOCOL_VERSION", 2)
        with pytest.raises(LaneError):
            await client.hello()


async def test_events_in_order(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path) as (_, client):
        events = [event async for event in client.generate(wire())]
        assert [type(event) for event in events] == [LaneAccepted, LaneTokens, LaneTokens, LaneTokens, LaneFinished]
        ids = [token.id for event in events if isinstance(event, LaneTokens) for token in event.tokens]
        assert ids == [token_at([5], index) for index in range(3)]


async def test_a_reader_that_stops_ends_the_call(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(token_delay_s=0.005)) as (lane, client):
        async with contextlib.aclosing(client.generate(wire(max_tokens=4000))) as events:
            async for event in events:
                if isinstance(event, LaneTokens):
                    break
        await until(lambda: bool(lane.ended))


async def test_cancel_and_its_confirmation(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(token_delay_s=0.005)) as (_, client):
        assert not await client.cancel("nobody")
        last = None
        async for event in client.generate(wire(max_tokens=4000)):
            if isinstance(event, LaneTokens) and isinstance(last, LaneAccepted):
                assert await client.cancel("r")
            last = event
        assert isinstance(last, LaneFinished)
        assert last.reason == lane_pb2.FINISH_REASON_CANCELLED


async def test_status_now_and_after_changes(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path) as (_, client):
        states = []
        async with contextlib.aclosing(client.watch()) as statuses:
            async for status in statuses:
                states.append(status.state)
                if len(states) == 1:
                    await client.drain()
                if status.state == lane_pb2.LANE_STATE_DRAINING:
                    break
        assert states[0] == lane_pb2.LANE_STATE_READY


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", LaneBusy),
        (grpc.StatusCode.UNAVAILABLE, "draining", LaneBusy),
        (grpc.StatusCode.UNAVAILABLE, "", LaneLost),
        (grpc.StatusCode.INVALID_ARGUMENT, "empty_prompt", LaneRejected),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", LaneTimeout),
        (grpc.StatusCode.INTERNAL, "engine_failed", LaneFailed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_reader", LaneFailed),
    ],
)
async def test_refusals_are_typed(tmp_path: Path, status: grpc.StatusCode, code: str, error: type[LaneError]) -> None:
    script = Script(fault="refuse", refuse_status=status, error_code=code)
    async with lane_and_client(tmp_path, script) as (_, client):
        with pytest.raises(error) as caught:
            _ = [event async for event in client.generate(wire())]
        assert type(caught.value) is error
        assert str(tmp_path) not in caught.value.message


async def test_nobody_there(tmp_path: Path) -> None:
    client = LaneClient(f"unix:{tmp_path}/nobody.sock", name="lane-0")
    with pytest.raises(LaneLost):
        await client.hello()
    with pytest.raises(LaneLost):
        _ = [event async for event in client.generate(wire())]
    await client.close()


async def test_no_answer_in_time(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(hello_delay_s=5.0)) as (_, client):
        with pytest.raises(LaneTimeout):
            await client.hello(timeout_s=0.05)


async def test_a_lane_that_dies_under_every_call(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(token_delay_s=0.005)) as (lane, client):

        async def stream() -> None:
            _ = [event async for event in client.generate(wire(max_tokens=4000))]

        async def status() -> None:
            _ = [status async for status in client.watch()]

        tasks = [asyncio.create_task(stream()), asyncio.create_task(status())]
        await until(lambda: lane.counters.generated_tokens > 1)
        await lane.crash()
        assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [LaneLost, LaneLost]


async def test_a_client_that_was_closed_is_a_lost_lane_and_not_a_cancelled_reader(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(token_delay_s=0.005)) as (lane, client):

        async def stream() -> None:
            _ = [event async for event in client.generate(wire(max_tokens=4000))]

        async def status() -> None:
            _ = [status async for status in client.watch()]

        tasks = [asyncio.create_task(stream()), asyncio.create_task(status())]
        await until(lambda: lane.counters.generated_tokens > 1)
        await client.close()
        assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [LaneLost, LaneLost]
        for call in (client.hello, client.drain, lambda: client.cancel("r")):
            with pytest.raises(LaneLost):
                await call()
        with pytest.raises(LaneLost):
            await stream()


async def test_a_cancelled_reader_is_cancelled(tmp_path: Path) -> None:
    async with lane_and_client(tmp_path, Script(token_delay_s=0.005)) as (lane, client):

        async def stream() -> None:
            _ = [event async for event in client.generate(wire(max_tokens=4000))]

        task = asyncio.create_task(stream())
        await until(lambda: lane.counters.generated_tokens > 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: bool(lane.ended))
