"""What `generate --address` says when what answers there is no gRPC door."""

import os
from pathlib import Path

import pytest

from coordinator.cli.answer import ask
from coordinator.errors import CoordinatorError
from laneproto.v1 import serve_pb2
from tests.fakes.doors import open_doors


async def said_of(target: str) -> str:
    request = serve_pb2.GenerateRequest(text="x", max_tokens=1)
    with pytest.raises(CoordinatorError) as caught:
        await ask(target, request, lambda text: None, timeout_s=60)
    assert caught.value.code == "unreachable"
    return caught.value.message


async def test_the_http_door_is_named_for_what_it_is_not(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1) as cluster:
        assert (await said_of(str(cluster.doors.http))).startswith("what answers there does not speak gRPC")


async def test_nobody_is_one_reason_without_grpcs_own_words(tmp_path: Path, unused_tcp_port: int) -> None:
    for target, errno in ((f"127.0.0.1:{unused_tcp_port}", 111), (f"unix:{tmp_path}/none", 2)):
        assert await said_of(target) == f"nobody answers there: {os.strerror(errno)}"
