"""`coordinator.client` against the real gRPC door."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import limits
from coordinator.client import FIRST_WAIT_S, Client
from coordinator.errors import CoordinatorError
from tests.fakes.doors import open_doors, until
from tests.fakes.lane import Script


async def test_an_answer_by_text_and_by_ids(tmp_path: Path) -> None:
    async with (
        open_doors(tmp_path, script=Script(tokens=(60, 61, 62))) as cluster,
        Client(str(cluster.doors.grpc), session="s") as client,
    ):
        assert (await client.model()).name == "fake"
        whole = await client.text("hello", max_tokens=3)
        assert whole
        events = [event async for event in client.generate([5, 6], max_tokens=3)]
        assert events[0].WhichOneof("event") == "started"
        assert events[-1].WhichOneof("event") == "finished"
        assert "".join(event.delta.text for event in events) == whole
        with pytest.raises(CoordinatorError) as caught:
            await client.text("hello", temperature=9.0)
        assert caught.value.code == "out_of_range"


async def test_what_may_be_tried_again_is_tried_again(tmp_path: Path) -> None:
    waits: list[float] = []
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=(60,))) as cluster:

        async def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                cluster.roster.set_state("lane-0", "ready")

        cluster.roster.set_state("lane-0", "quarantined")
        async with Client(str(cluster.doors.grpc), tries=3, sleep=sleep) as client:
            assert await client.text("x", max_tokens=1)
            assert waits == [limits.RETRY_AFTER_S] * 2  # what the server names
            cluster.roster.set_state("lane-0", "quarantined")
            with pytest.raises(CoordinatorError) as caught:
                await client.text("x", max_tokens=1)
            assert caught.value.code == "no_lane"
            assert len(waits) == 4
    waits.clear()
    async with Client(f"unix:{tmp_path}/nobody.sock", tries=3, sleep=sleep) as client:
        with pytest.raises(CoordinatorError):
            await client.text("x")
    assert waits == [FIRST_WAIT_S, 2 * FIRST_WAIT_S]


async def test_an_answer_that_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    seen: list[str | None] = []
    async with (
        open_doors(tmp_path, lanes=1, script=Script(fault="error", fault_after=2)) as cluster,
        Client(str(cluster.doors.grpc)) as client,
    ):

        async def read() -> None:
            async for event in client.generate("x", max_tokens=30):
                seen.append(event.WhichOneof("event"))

        with pytest.raises(CoordinatorError):
            await read()
    assert seen.count("started") == 1


async def test_who_stops_reading_frees_the_lane(tmp_path: Path) -> None:
    async with (
        open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.01)) as cluster,
        Client(str(cluster.doors.grpc)) as client,
    ):
        answer = client.generate("x", max_tokens=1000)
        await anext(answer)
        await answer.aclose()
        await until(lambda: not cluster.lanes[0].busy, 60)
