"""How requests end on real gRPC and simulated lanes: cancelled, at their own time, unread, at the close."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from coordinator import limits
from coordinator.errors import (
    Cancelled,
    Closing,
    DeadlineExceeded,
    LaneTimeout,
    SlowReader,
)
from coordinator.generation import Begun, Ended, Tokens
from laneproto.v1 import lane_pb2
from tests.fakes.dispatching import ENDLESS, SLOW, fleet, made_up, read_all, request
from tests.fakes.doors import until
from tests.fakes.lane import Script


async def test_cancel_frees_the_lane_within_a_step(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, roster, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        assert await generation.read() == Begun("lane-0")
        await generation.read()
        generation.cancel()
        while not isinstance(end := await generation.read(), Ended):
            pass
        assert end.reason == lane_pb2.FINISH_REASON_CANCELLED
        await until(lambda: lanes[0].ended == [(generation.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        assert lanes[0].counters.generated_tokens < 1000
        await until(lambda: dispatcher.running("lane-0") == 0)
        await read_all(dispatcher.submit(request()))
        assert roster.suspects == []


async def test_cancel_before_the_lane_has_accepted(tmp_path: Path) -> None:
    async with fleet(tmp_path, Script(prefill_delay_s=5.0)) as (dispatcher, _, lanes):
        generation = dispatcher.submit(request())
        generation.cancel()  # overtakes its own Generate
        with contextlib.suppress(Cancelled):
            await read_all(generation)
        await until(lambda: dispatcher.running("lane-0") == 0)
        assert [reason for _, reason in lanes[0].ended] in ([], [lane_pb2.FINISH_REASON_CANCELLED])


async def test_a_lane_that_does_not_confirm_is_suspect_and_gets_no_more_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CANCEL_CONFIRM_S", 0.1)
    async with fleet(tmp_path, Script(token_delay_s=0.01, ignore_cancel=True)) as (dispatcher, roster, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        await generation.read()
        generation.cancel()
        with pytest.raises(LaneTimeout):
            await read_all(generation)
        await until(lambda: roster.suspects == ["lane-0"])
        following = dispatcher.submit(request())
        await asyncio.sleep(0.05)
        assert dispatcher.running("lane-0") == 1  # the place stays taken
        assert dispatcher.position(following) == 0
        roster.lose("lane-0")  # the fleet killed it
        assert dispatcher.position(following) == 0
        await lanes[0].restart(Script())
        await roster.returned("lane-0")
        ids, _ = await read_all(following)
        assert ids == made_up((5,), 3)


async def test_a_request_ends_at_its_own_time_in_the_queue_and_on_a_lane(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, _, lanes):
        running = dispatcher.submit(request((5,), 4000, timeout_s=1.5))
        waiting = dispatcher.submit(request((6,), 4000, timeout_s=0.1))
        with pytest.raises(DeadlineExceeded):
            await read_all(waiting)
        assert dispatcher.queued == 0
        with pytest.raises(DeadlineExceeded):
            await read_all(running)
        await until(lambda: lanes[0].ended == [(running.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        await until(lambda: dispatcher.running("lane-0") == 0)
    (tmp_path / "again").mkdir()
    async with fleet(tmp_path / "again", Script(prefill_delay_s=60)) as (dispatcher, _, lanes):
        with pytest.raises(DeadlineExceeded):  # in prefill
            await read_all(dispatcher.submit(request((5,), 4000, timeout_s=0.1)))
        await until(lambda: dispatcher.running("lane-0") == 0)


async def test_a_reader_that_stopped_ends_its_request_and_frees_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUFFERED_TOKENS", 8)
    async with fleet(tmp_path, Script()) as (dispatcher, _, lanes):
        generation = dispatcher.submit(request((5,), 4000))
        await until(lambda: dispatcher.running("lane-0") == 0)
        await until(lambda: [reason for _, reason in lanes[0].ended] == [lane_pb2.FINISH_REASON_CANCELLED])
        assert await generation.read() == Begun("lane-0")
        event = await generation.read()
        assert isinstance(event, Tokens)
        assert [token.id for token in event.tokens] == made_up((5,), 8)
        with pytest.raises(SlowReader):
            await generation.read()


async def test_closing_gives_everything_an_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, ENDLESS) as (dispatcher, _, lanes):
        running, waiting = dispatcher.submit(request((5,), 4000)), dispatcher.submit(request())
        await running.read()
        await dispatcher.close()
        for generation in (running, waiting):
            with pytest.raises(Closing):
                await read_all(generation)
        await until(lambda: lanes[0].ended == [(running.request.id, lane_pb2.FINISH_REASON_CANCELLED)])
        with pytest.raises(Closing):
            dispatcher.submit(request())


async def test_closing_with_grace_lets_running_requests_end(tmp_path: Path) -> None:
    async with fleet(tmp_path, SLOW) as (dispatcher, _, _lanes):
        running = dispatcher.submit(request((5,), 5))
        await running.read()
        await dispatcher.close(grace_s=10)
        assert (await read_all(running))[0] == made_up((5,), 5)
