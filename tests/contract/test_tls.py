"""TLS at both doors, and what may listen where."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path

import aiohttp
import grpc
import pytest
from click.testing import CliRunner

from coordinator.channel import Trust
from coordinator.cli import commands
from coordinator.client import Client
from coordinator.config import check_reach, parse_door
from coordinator.errors import BadAddress, BadOption, CoordinatorError
from coordinator.tls import Tls, named_tls
from laneproto.v1 import serve_pb2, serve_pb2_grpc
from tests.fakes.doors import open_doors
from tests.fakes.lane import Script


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*words, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return Tls(certificate, key)


async def test_both_doors_speak_tls_and_nothing_else(tmp_path: Path, pair: Tls) -> None:
    async with open_doors(tmp_path, tls=pair) as cluster:
        context = ssl.create_default_context(cafile=str(pair.certificate))
        url = f"https://{cluster.doors.http}/v1/models"
        async with aiohttp.ClientSession() as client:
            async with client.get(url, ssl=context) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get(url)
            with pytest.raises(aiohttp.ClientError):
                await client.get(url.replace("https", "http"))
        credentials = grpc.ssl_channel_credentials(pair.certificate.read_bytes())
        options = (("grpc.ssl_target_name_override", "localhost"),)
        async with grpc.aio.secure_channel(f"{cluster.doors.grpc}", credentials, options=options) as channel:
            reply = await serve_pb2_grpc.ExpresswayStub(channel).GetModel(serve_pb2.GetModelRequest(), timeout=60)
            assert reply.model.name == "fake"


async def test_the_client_and_the_command_speak_tls(tmp_path: Path, pair: Tls) -> None:
    async with open_doors(tmp_path, tls=pair, script=Script(tokens=(60, 61, 2))) as cluster:
        target = str(cluster.doors.grpc)
        async with Client(target, tls=Trust(pair.certificate)) as client:
            said = await client.text(serve_pb2.Chat(messages=[serve_pb2.ChatMessage(role="user", content="Hi")]))
        words = ["generate", "--address", target, "--prompt", "Hi", "--chat", "--json"]
        done = await asyncio.to_thread(CliRunner().invoke, commands, [*words, "--tls-ca", str(pair.certificate)])
        assert json.loads(done.stdout)["text"] == said
        for plain_or_unknown, why in (([], "may speak TLS only"), (["--tls"], "not trusted: self")):
            done = await asyncio.to_thread(CliRunner().invoke, commands, [*words, *plain_or_unknown])
            assert getattr(done.exception, "code", None) == "unreachable"
            assert why in str(done.exception)
        async with Client(target, tls=Trust(pair.certificate, "elsewhere.example"), tries=1) as client:
            with pytest.raises(CoordinatorError, match="not trusted: it is of another name"):
                await client.text("Hi")


async def test_a_door_without_tls_is_named_so(tmp_path: Path, pair: Tls) -> None:
    async with (
        open_doors(tmp_path) as cluster,
        Client(str(cluster.doors.grpc), tls=Trust(pair.certificate), tries=1) as client,
    ):
        with pytest.raises(CoordinatorError, match="what answers there does not speak TLS"):
            await client.text("Hi")


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff"])
def test_trust_in_nothing_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOption):
        Client("127.0.0.1:1", tls=Trust(file))


def test_files_that_are_no_pair_are_refused(tmp_path: Path, pair: Tls) -> None:
    assert named_tls(None, None) is None
    assert named_tls(pair.certificate, pair.key) == pair
    for certificate, key in (
        (pair.certificate, None), (None, pair.key), (pair.key, pair.certificate), (pair.certificate, tmp_path / "none"),
    ):  # fmt: skip
        with pytest.raises(BadOption):
            named_tls(certificate, key)


@pytest.mark.parametrize("text", ["0.0.0.0:80", "[::]:80", "192.168.0.1:80"])
def test_elsewhere_only_with_keys_and_tls(text: str) -> None:
    address = parse_door(text)
    check_reach(address, keys=True, tls=True)
    for keys, tls in ((False, False), (True, False), (False, True)):
        with pytest.raises(BadAddress, match="no keys and no TLS"):
            check_reach(address, keys=keys, tls=tls)
    check_reach(parse_door("127.0.0.1:80"), keys=False, tls=False)
    check_reach(parse_door("unix:/run/x.sock"), keys=False, tls=False)
