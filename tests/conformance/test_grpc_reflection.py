"""A gRPC client that knows nothing but the address: it learns the service by reflection, as grpcurl does, and asks.

And one whose code is generated from the shipped .proto files, as a user of another language makes it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

from tests.fakes.doors import open_doors, spelt, thinking_dir
from tests.fakes.lane import Script

pytestmark = pytest.mark.conformance

PROTO = Path(__file__).parents[2] / "proto"
SERVICE = "expressway.v1.Expressway"
SAID = "I think.\n</think>\n\nGood morning.<|im_end|>"
ASK = {"chat": {"messages": [{"role": "user", "content": "Hello"}]}, "maxTokens": 64}


def by_reflection(address: str) -> list[dict[str, Any]]:
    """Everything as plain JSON, the way grpcurl shows it."""
    with grpc.insecure_channel(address) as channel:
        known = ProtoReflectionDescriptorDatabase(channel)
        assert set(known.get_services()) >= {SERVICE, "grpc.health.v1.Health"}
        pool = DescriptorPool(known)
        method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
        takes, gives = (message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type))
        call = channel.unary_stream(
            f"/{SERVICE}/Generate", request_serializer=takes.SerializeToString, response_deserializer=gives.FromString
        )
        return [MessageToDict(event) for event in call(ParseDict(ASK, takes()), timeout=60)]


async def test_what_reflection_says_is_enough(tmp_path: Path) -> None:
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=spelt(SAID)), text_from=thinking_dir()) as cluster:
        events = await asyncio.to_thread(by_reflection, str(cluster.doors.grpc))
    assert list(events[0]) == ["started"]
    assert "".join(event.get("delta", {}).get("reasoning", "") for event in events) == "I think."
    assert "".join(event.get("delta", {}).get("text", "") for event in events) == "Good morning."
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_STOP"


GENERATED = """
import sys
sys.path.insert(0, sys.argv[1])
import grpc
from laneproto.v1 import serve_pb2, serve_pb2_grpc
with grpc.insecure_channel(sys.argv[2]) as channel:
    stub = serve_pb2_grpc.ExpresswayStub(channel)
    chat = serve_pb2.Chat(messages=[serve_pb2.ChatMessage(role="user", content="Hello")])
    for event in stub.Generate(serve_pb2.GenerateRequest(chat=chat, max_tokens=64), timeout=60):
        print(event.delta.text, end="")
"""


async def test_code_generated_from_the_shipped_files(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    files = sorted(map(str, PROTO.rglob("*.proto")))
    assert protoc.main(["", f"-I{PROTO}", f"--python_out={made}", f"--grpc_python_out={made}", *files]) == 0
    async with open_doors(tmp_path, lanes=1, script=Script(tokens=spelt(SAID)), text_from=thinking_dir()) as cluster:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GENERATED, str(made), str(cluster.doors.grpc),
            stdout=asyncio.subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip
        async with asyncio.timeout(120):
            out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"Good morning.")
