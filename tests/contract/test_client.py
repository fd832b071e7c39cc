"""`coordinator.client` against the real gRPC door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from coordinator import limits
from coordinator.client import FIRST_WAIT_S, LONGEST_WAIT_S, Client
from coordinator.doors.grpc import SERVICE
from coordinator.errors import AnswerCut, CoordinatorError
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


class Refusing:
    """A door of its own, that says what it is told to."""

    def __init__(self, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        self.trailing = trailing

    async def generate(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "wait", trailing_metadata=self.trailing)


def retry_info(seconds: float, code: int = 14) -> tuple[str, bytes]:
    status = status_pb2.Status(code=code, message="wait")
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(int(seconds * 1000))
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return "grpc-status-details-bin", status.SerializeToString()


@pytest.mark.parametrize(
    ("trailing", "waited_s"),
    [
        ((retry_info(2.5), ("retry-after", "9")), 2.5),
        ((retry_info(7200),), LONGEST_WAIT_S),
        ((retry_info(-3),), FIRST_WAIT_S),
        ((("retry-after", "3"),), 3.0),
        ((("retry-after", "soon"),), FIRST_WAIT_S),
        ((retry_info(2.5, code=3), ("retry-after", "9")), FIRST_WAIT_S),  # a status that is not this call's
        ((("grpc-status-details-bin", b"\xff\xff"), ("retry-after", "9")), FIRST_WAIT_S),
        ((), FIRST_WAIT_S),
    ],
)
async def test_the_server_says_how_long_to_wait(
    tmp_path: Path, trailing: tuple[tuple[str, str | bytes], ...], waited_s: float
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    server = grpc.aio.server()
    method = grpc.unary_stream_rpc_method_handler(Refusing(trailing).generate)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Generate": method})])
    server.add_insecure_port(f"unix:{tmp_path}/door.sock")
    await server.start()
    try:
        async with Client(f"unix:{tmp_path}/door.sock", tries=2, sleep=sleep) as client:
            with pytest.raises(CoordinatorError):
                await client.text("x")
    finally:
        await server.stop(None)
    assert waits == [waited_s]


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


@contextlib.asynccontextmanager
async def cable(to: str, path: Path) -> AsyncIterator[Callable[[], None]]:
    """A Unix socket that carries bytes to another one, until it is cut."""
    ends: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(to)
        ends.extend((writer, far_writer))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    def cut() -> None:
        server.close()
        for end in ends:
            end.transport.abort()

    server = await asyncio.start_unix_server(join, path)
    try:
        yield cut
    finally:
        cut()


async def test_a_connection_that_breaks_inside_an_answer_says_how_much_came(tmp_path: Path) -> None:
    """As when the server is killed: typed, retryable, and not tried again by itself."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async with open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.01)) as cluster:
        came = 0
        async with (
            cable(str(cluster.doors.grpc).removeprefix("unix:"), tmp_path / "cable.sock") as cut,
            Client(f"unix:{tmp_path}/cable.sock", sleep=sleep) as client,
        ):

            async def read() -> None:
                nonlocal came
                async for event in client.generate("x", max_tokens=3000):
                    came += len(event.delta.tokens)
                    if came >= 5:
                        cut()

            with pytest.raises(AnswerCut, match=r"after \d+ tokens") as caught:
                await read()
        assert (caught.value.tokens, caught.value.retryable, caught.value.code) == (came, True, "answer_cut")
        assert waits == []
        await until(lambda: not cluster.lanes[0].busy, 60)  # nobody reads: the lane is free


async def test_who_stops_reading_frees_the_lane(tmp_path: Path) -> None:
    async with (
        open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.01)) as cluster,
        Client(str(cluster.doors.grpc)) as client,
    ):
        answer = client.generate("x", max_tokens=1000)
        await anext(answer)
        await answer.aclose()
        await until(lambda: not cluster.lanes[0].busy, 60)
