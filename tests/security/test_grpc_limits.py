"""Bounds of the gRPC door that only a real connection meets."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import limits
from coordinator.doors.grpc import GENERATE
from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors
from tests.fakes.lane import Script


async def test_metadata(tmp_path):
    """The bound counts names, values and 32 bytes an entry, also of gRPC's own: well below, and just above."""
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=(5,))) as cluster:
        small = (("x-filler", "x" * (limits.GRPC_METADATA_BYTES // 2)),)
        assert await cluster.generate(small, text="a", max_tokens=1)
        large = (("x-filler", "x" * limits.GRPC_METADATA_BYTES),)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(large, text="a", max_tokens=1)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await cluster.generate(text="a", max_tokens=1)


async def test_calls_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "GRPC_CALLS", 2)
    async with open_doors(tmp_path, lanes=1, script=Script(token_delay_s=0.01)) as cluster:
        request = serve_pb2.GenerateRequest(text="a", max_tokens=4000)
        calls = [cluster.stub.Generate(request)]
        await calls[0].read()  # it runs, and only then comes the one that has to wait
        calls.append(cluster.stub.Generate(request))
        async with asyncio.timeout(60):
            while cluster.doors.serving.dispatcher.queued < 1:
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(text="a", max_tokens=1)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_calls_that_ask_for_no_answer(tmp_path, monkeypatch):
    """Whoever watches the health of a door, with a key or without, leaves places for answers."""
    monkeypatch.setattr(limits, "GRPC_OTHER_CALLS", 2)
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=(5,))) as cluster:
        health = health_pb2_grpc.HealthStub(cluster.channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for call in watching:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert (await cluster.stub.ListLanes(serve_pb2.ListLanesRequest())).lanes
        assert await cluster.generate(text="a", max_tokens=1)
        watching.pop().cancel()
        async with asyncio.timeout(60):
            while len(watching) < 2:  # its place is free when the server has heard of it
                call = health.Watch(health_pb2.HealthCheckRequest())
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.read()
                    watching.append(call)
        for call in watching:
            call.cancel()


async def test_a_call_that_says_nothing_ends(tmp_path, monkeypatch):
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=(5,))) as cluster:

        async def waits():
            await asyncio.Event().wait()
            yield b""

        async def ends():
            return
            yield b""

        async def garbage():
            yield b"\xff\xff"

        for messages, code, words, limit_s in (
            (ends, "INVALID_ARGUMENT", "no message", 60.0),
            (garbage, "INVALID_ARGUMENT", "not of this method's type", 60.0),
            (waits, "DEADLINE_EXCEEDED", "did not arrive", 0.2),
        ):
            monkeypatch.setattr(limits, "BODY_READ_S", limit_s)
            for method in (GENERATE, GENERATE.replace("Generate", "GetModel")):
                with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                    await cluster.channel.stream_stream(method)(messages()).read()
                assert refused.value.code().name == code
        monkeypatch.undo()
        assert await cluster.generate(text="a", max_tokens=1)
