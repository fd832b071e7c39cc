"""Bounds of the gRPC door that only a real connection meets."""

import asyncio

import grpc
import pytest

from coordinator import limits
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
