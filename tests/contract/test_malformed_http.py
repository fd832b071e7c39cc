"""What is not HTTP as this door reads it: one answer in the shape of the API that was meant, then the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.doors import Cluster, open_doors

HOST = b"\r\nHost: localhost\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
CASES = {
    "TLS": b"\x16\x03\x01\x00\xa5garbage\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "method": b"GE(T /v1/models HTTP/1.1" + HOST + b"\r\n",
    "version": b"GET /v1/models HTTP/9.x" + HOST + b"\r\n",
    "target": b"GET http://[::1/v1/models HTTP/1.1" + HOST + b"\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "long line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1" + HOST + b"\r\n",
    "length": b"POST /v1/chat/completions HTTP/1.1" + JSON + b"Content-Length: abc\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1" + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "expectation": b"POST /v1/responses HTTP/1.1" + JSON + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}",
    "expectation nowhere": b"POST /nothing HTTP/1.1" + JSON + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}",
}
MESSAGES = {
    "no colon": b"POST /v1/messages HTTP/1.1" + HOST + b"broken\r\n\r\n",
    "long header": b"POST /v1/messages HTTP/1.1" + HOST + b"X: " + b"secret" * 4000 + b"\r\n\r\n",
    "many headers": b"POST /v1/messages HTTP/1.1" + HOST + b"".join(b"X%d: y\r\n" % n for n in range(5000)) + b"\r\n",
    "both": b"POST /v1/messages HTTP/1.1" + JSON + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding": b"POST /v1/messages/count_tokens HTTP/1.1" + JSON + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "chunk": b"POST /v1/messages HTTP/1.1" + JSON + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n{}\r\n0\r\n\r\n",
    "expectation": b"POST /v1/messages HTTP/1.1" + JSON + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with open_doors(tmp_path_factory.mktemp("doors"), lanes=1) as opened:
        yield opened


async def answer(cluster: Cluster, data: bytes) -> tuple[bytes, dict[str, str], dict[str, object]]:
    reader, writer = await asyncio.open_connection(cluster.doors.http.host, cluster.doors.http.port)
    try:
        writer.write(data)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        status, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 60)
        assert b"secret" not in head + body
        return status.split()[1].encode(), headers, json.loads(body)
    finally:
        writer.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_in_openais_shape(cluster: Cluster, name: str) -> None:
    status, headers, body = await answer(cluster, CASES[name])
    assert (status, headers["content-type"], headers["server"]) == (b"400", "application/json", "expressway")
    assert len(headers["x-request-id"]) == 24
    error = body["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_request", None)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", MESSAGES)
async def test_in_anthropics_shape(cluster: Cluster, name: str) -> None:
    status, headers, body = await answer(cluster, MESSAGES[name])
    assert (status, headers["content-type"], headers["server"]) == (b"400", "application/json", "expressway")
    assert body["type"] == "error"
    assert body["request_id"] == headers["request-id"] == headers["x-request-id"]
    error = body["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_door_is_as_before(cluster: Cluster) -> None:
    status, _ = await cluster.get("/healthz")
    assert status == 200
