"""The public gRPC door over real sockets, on simulated lanes."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator import limits
from coordinator.config import Address
from coordinator.errors import BadAddress
from coordinator.frontdoor import start_doors
from coordinator.text.tokenizer import Tokenizer
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc
from tests.fakes.doors import VOCAB_SIZE, Cluster, open_doors, tokenizer_dir, until
from tests.fakes.lane import Script, token_at
from tests.fakes.roster import FakeRoster

ENDLESS = Script(token_delay_s=0.005)
CANCELLED = lane_pb2.FINISH_REASON_CANCELLED
TEXT = "Zürich → 東京 🚄 done"


def tokenizer() -> Tokenizer:
    found = Tokenizer.load(tokenizer_dir())
    assert found is not None
    return found


def kinds(events: list[serve_pb2.GenerateResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def ids_of(events: list[serve_pb2.GenerateResponse]) -> list[int]:
    return [token.id for event in events for token in event.delta.tokens]


async def refusal(cluster: Cluster, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(**fields)
    return caught.value.code(), str(dict(caught.value.trailing_metadata())["expressway-error-code"])


async def test_text_in_text_out(tmp_path: Path) -> None:
    said = tokenizer().encode(TEXT)
    async with open_doors(tmp_path, script=Script(tokens=(*said, 2))) as cluster:
        events = await cluster.generate(text="hello <|im_end|>", seed=9, logprobs=2)
        assert kinds(events) == ["started", *["delta"] * (len(kinds(events)) - 2), "finished"]
        started, finished = events[0].started, events[-1].finished
        sent = cluster.lanes[0].requests[0]
        assert list(sent.prompt_ids) == tokenizer().encode("hello <|im_end|>")
        assert tokenizer().special("<|im_end|>") not in sent.prompt_ids
        assert (started.request_id, started.lane, started.seed) == (sent.request_id, "lane-0", 9)
        assert started.prompt_tokens == len(sent.prompt_ids) == finished.usage.prompt_tokens
        assert "".join(event.delta.text for event in events) == TEXT
        assert ids_of(events) == [*said, 2]
        tokens = [token for event in events for token in event.delta.tokens]
        assert all(token.stamp_ns and token.logprob == -0.5 and len(token.top) == 2 for token in tokens)
        assert finished.reason == lane_pb2.FINISH_REASON_STOP
        assert finished.lane == "lane-0"
        assert finished.counters.generated_tokens == len(said) + 1


async def test_token_ids_in_and_defaults(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        events = await cluster.generate(token_ids=serve_pb2.TokenIds(ids=[5, 6]), max_tokens=4)
        assert ids_of(events) == [token_at([5, 6], index, VOCAB_SIZE) for index in range(4)]
        assert events[-1].finished.reason == lane_pb2.FINISH_REASON_LENGTH
        await cluster.generate(token_ids=serve_pb2.TokenIds(ids=[5]), stop_ids=[token_at([5], 2, VOCAB_SIZE)])
        first, second = cluster.lanes[0].requests
        assert (first.sampling.temperature, first.sampling.top_p, first.logprobs) == (0.0, 1.0, False)
        assert second.max_tokens == 4095  # what the context leaves
        assert first.sampling.seed != second.sampling.seed


async def test_sampling_fields_reach_the_lane(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        await cluster.generate(text="x", max_tokens=1, temperature=1.5, top_k=7, top_p=0.25, seed=(1 << 64) - 1)
        sampling = cluster.lanes[0].requests[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (1.5, 7, 0.25, (1 << 64) - 1)


async def test_a_stop_string_ends_the_text_and_frees_the_lane(tmp_path: Path) -> None:
    script = Script(tokens=tuple(tokenizer().encode("one two STOP three " * 40)), token_delay_s=0.001)
    async with open_doors(tmp_path, lanes=1, script=script) as cluster:
        events = await cluster.generate(text="x", stop=[" STOP"], max_tokens=2000)
        assert "".join(event.delta.text for event in events) == "one two"
        finished = events[-1].finished
        assert finished.reason == lane_pb2.FINISH_REASON_STOP
        assert finished.usage.completion_tokens == len(ids_of(events))
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED])


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, "INVALID_ARGUMENT", "invalid_request"),
        ({"text": ""}, "INVALID_ARGUMENT", "empty_prompt"),
        ({"token_ids": serve_pb2.TokenIds()}, "INVALID_ARGUMENT", "empty_prompt"),
        ({"token_ids": serve_pb2.TokenIds(ids=[VOCAB_SIZE])}, "INVALID_ARGUMENT", "token_out_of_range"),
        ({"token_ids": serve_pb2.TokenIds(ids=[5] * 64)}, "INVALID_ARGUMENT", "context_length_exceeded"),
        ({"text": "w " * 200}, "INVALID_ARGUMENT", "context_length_exceeded"),
        ({"text": "x", "max_tokens": 0}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "temperature": float("nan")}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "temperature": -1}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "min_p": float("nan")}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "repetition_penalty": 0.0}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "presence_penalty": float("inf")}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "frequency_penalty": 2.5}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "logit_bias": {1: float("nan")}}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "logit_bias": {2**32 - 1: 1.0}}, "INVALID_ARGUMENT", "token_out_of_range"),
        ({"text": "x", "logit_bias": dict.fromkeys(range(301), 1.0)}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "min_tokens": 9, "max_tokens": 8}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "top_p": 0}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "top_k": limits.TOP_K_MAX + 1}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "logprobs": 21}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "stop": ["x"] * 17}, "INVALID_ARGUMENT", "out_of_range"),
        ({"text": "x", "stop_ids": [VOCAB_SIZE]}, "INVALID_ARGUMENT", "token_out_of_range"),
        ({"text": "x", "session": "x" * 257}, "INVALID_ARGUMENT", "invalid_request"),
    ],
)
async def test_refusals_are_typed(tmp_path: Path, fields: dict[str, Any], status: str, code: str) -> None:
    async with open_doors(tmp_path, lanes=1, context_tokens=64) as cluster:
        assert await refusal(cluster, **fields) == (grpc.StatusCode[status], code)
        assert not cluster.lanes[0].requests


async def test_no_room_and_no_lane(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS, queue_requests=0) as cluster:
        assert await refusal(cluster, text="x") == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")
        cluster.roster.lose("lane-0", "quarantined")
        assert await refusal(cluster, text="x") == (grpc.StatusCode.UNAVAILABLE, "no_lane")


async def test_a_message_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(text="x" * (limits.GRPC_MESSAGE_BYTES + 1))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_sessions_by_metadata_or_field(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=3) as cluster:

        async def lane(session: str, by: str) -> str:
            metadata = (("x-session-id", session),) if by == "metadata" else ()
            fields = {"session": session if by == "field" else "other"}
            return (await cluster.generate(metadata, text="x", max_tokens=1, **fields))[0].started.lane

        home = await lane("a", "metadata")
        assert await lane("b", "metadata") != home
        assert await lane("a", "field") == await lane("a", "metadata") == home
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await lane("x" * 257, "metadata")
        assert "x-session-id" in str(caught.value.details())


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_gives_up_frees_the_lane(tmp_path: Path, how: str) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster:
        timeout = 0.3 if how == "deadline" else None
        call = cluster.stub.Generate(serve_pb2.GenerateRequest(text="x", max_tokens=4000), timeout=timeout)
        assert (await call.read()).WhichOneof("event") == "started"
        if how == "cancel":
            call.cancel()
        assert await call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED])
        assert cluster.lanes[0].counters.generated_tokens < 2000
        assert len(await cluster.generate(text="x", max_tokens=2)) >= 3


async def test_a_deadline_in_the_queue(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=ENDLESS) as cluster:
        running = asyncio.create_task(cluster.generate(text="x", max_tokens=80))
        await until(lambda: cluster.doors.serving.dispatcher.running("lane-0") == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Generate(serve_pb2.GenerateRequest(text="y"), timeout=0.05).read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: cluster.doors.serving.dispatcher.queued == 0)
        await running
        assert len(cluster.lanes[0].requests) == 1


async def test_a_lane_that_dies_is_the_last_event_and_others_go_on(tmp_path: Path) -> None:
    async with open_doors(tmp_path, script=ENDLESS) as cluster:
        cluster.lanes[1].script_next(fault="break", fault_after=85)  # it takes over, and fails, too
        doomed = asyncio.create_task(cluster.generate(text="x", max_tokens=4000))
        await until(lambda: cluster.lanes[0].counters.generated_tokens > 2)
        other = asyncio.create_task(cluster.generate(text="y", max_tokens=80))
        await until(lambda: cluster.lanes[1].busy)
        await cluster.lanes[0].crash()
        events = await doomed
        assert kinds(events).count("finished") == 1
        finished = events[-1].finished
        assert (finished.reason, finished.error_code) == (lane_pb2.FINISH_REASON_ERROR, "lane_lost")
        assert finished.usage.completion_tokens == len(ids_of(events)) > 0
        assert (await other)[-1].finished.reason == lane_pb2.FINISH_REASON_LENGTH


class Wire:
    """Between a client and a socket; once cut, nothing passes, and neither side is told."""

    def __init__(self, target: str) -> None:
        self._target, self._cut = target, asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = "127.0.0.1:" + str(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._server.close()

    def cut(self) -> None:
        self._cut.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self._cut.is_set():
                sink.write(data)


async def test_a_client_that_is_gone_without_a_word_frees_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRPC_PING_S", 1.0)
    monkeypatch.setattr(limits, "GRPC_PING_TIMEOUT_S", 1.0)
    async with (
        open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.05)) as cluster,
        Wire(str(tmp_path / "grpc.sock")) as wire,
        grpc.aio.insecure_channel(wire.address) as channel,
    ):
        call = serve_pb2_grpc.ExpresswayStub(channel).Generate(serve_pb2.GenerateRequest(text="x", max_tokens=4000))
        assert (await call.read()).WhichOneof("event") == "started"
        wire.cut()
        await until(lambda: [reason for _, reason in cluster.lanes[0].ended] == [CANCELLED], 60)
        call.cancel()


async def test_lanes_and_model(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=2, script=ENDLESS) as cluster:
        running = [asyncio.create_task(cluster.generate(text="x", max_tokens=60)) for _ in range(3)]
        await until(lambda: cluster.doors.serving.dispatcher.queued == 1)
        reply = await cluster.stub.ListLanes(serve_pb2.ListLanesRequest())
        assert [(lane.lane, lane.state, lane.running) for lane in reply.lanes] == [
            ("lane-0", "busy", 1), ("lane-1", "busy", 1),
        ]  # fmt: skip
        assert reply.queued == 1
        await asyncio.gather(*running)
        cluster.roster.lose("lane-1", "quarantined")
        reply = await cluster.stub.ListLanes(serve_pb2.ListLanesRequest())
        assert [lane.state for lane in reply.lanes] == ["ready", "quarantined"]
        model = (await cluster.stub.GetModel(serve_pb2.GetModelRequest())).model
        assert model == cluster.lanes[0].model


async def test_health_follows_the_lanes(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        stub = health_pb2_grpc.HealthStub(cluster.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="expressway.v1.Expressway"))
        kinds = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == kinds.SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == kinds.SERVING
        cluster.roster.lose("lane-0")
        assert (await watch.read()).status == kinds.NOT_SERVING
        await cluster.roster.returned("lane-0")
        assert (await watch.read()).status == kinds.SERVING
        watch.cancel()


async def test_reflection_names_the_service(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for reply in stub.ServerReflectionInfo(asked):
            names = {service.name for service in reply.list_services_response.service}
        assert {"expressway.v1.Expressway", "grpc.health.v1.Health"} <= names


async def test_addresses_that_are_taken(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        taken = cluster.doors.http
        free = Address("127.0.0.1", 0)
        for http, grpc_at in ((taken, free), (free, taken)):
            with pytest.raises(BadAddress):
                await start_doors(FakeRoster(), tokenizer_dir(), http=http, grpc_at=grpc_at)


async def test_unix_sockets_are_private(tmp_path: Path) -> None:
    http, grpc_at = Address(path=str(tmp_path / "http.sock")), Address(path=str(tmp_path / "grpc.sock"))
    doors = await start_doors(FakeRoster(), tokenizer_dir(), http=http, grpc_at=grpc_at)
    try:
        for address in (doors.http, doors.grpc):
            mode = Path(address.path).stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
    finally:
        await doors.close()
