"""Keys at the doors: every route and method without one is refused, and changes of the file hold at once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from coordinator.auth import Auth
from coordinator.cli.keys import command
from coordinator.errors import BadTenants, Unauthorized
from coordinator.tenants import ANYONE
from laneproto.v1 import serve_pb2
from tests.fakes.doors import Cluster, open_doors


def keys(*arguments: str, path: Path) -> str:
    done = CliRunner().invoke(command, [*arguments, "--tenants", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


@contextlib.asynccontextmanager
async def keyed(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Path, str]]:
    path = tmp_path / "tenants.json"
    key = keys("add", "ann", path=path)
    (tmp_path / "s").mkdir()
    async with open_doors(tmp_path / "s", auth=Auth(path)) as cluster:
        yield cluster, path, key


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


async def test_every_route_and_method_without_a_key(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (cluster, _, key):
        app = cluster.doors._runner.app
        assert app is not None
        routes = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
        assert len(routes) >= 7
        paths = [*(path.replace("{name}", "x") for path in routes), "/", "/nothing", "/healthz/"]
        for path in paths:
            for method in METHODS:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": key}):
                    async with cluster.http.request(method, path, headers=headers) as response:
                        open_route = path == "/healthz"
                        assert (response.status == 401) == (not open_route), (path, method, headers)
        async with cluster.http.post("/v1/messages", json={}) as response:
            assert (await response.json())["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert not [lane.requests for lane in cluster.lanes if lane.requests]


async def test_a_key_opens_and_names_its_tenant(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (cluster, _, key):
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            status, _, _ = await cluster.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, headers)
            assert status == 200
        sent = {request.tenant_salt for lane in cluster.lanes for request in lane.requests}
        assert len(sent) == 1
        assert sent != {ANYONE.salt}


async def test_grpc_needs_a_key_for_all_but_health(tmp_path: Path) -> None:
    async with keyed(tmp_path) as (cluster, _, key):
        channel = cluster.channel
        empty = serve_pb2.GetModelRequest()
        service = serve_pb2.DESCRIPTOR.services_by_name["Expressway"]
        for method in service.methods:
            call = channel.unary_stream(f"/{service.full_name}/{method.name}", request_serializer=lambda _: b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(None):
                    pass
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
            assert ("expressway-error-code", "unauthorized") in tuple(caught.value.trailing_metadata() or ())
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in reflect(iter([b""])):
                pass
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"")
        reply = await cluster.stub.GetModel(empty, metadata=(("authorization", f"Bearer {key}"),))
        assert reply.model.name == "fake"
        events = await cluster.generate((("x-api-key", key),), token_ids=serve_pb2.TokenIds(ids=[5]), max_tokens=1)
        assert events[-1].HasField("finished")


async def test_changes_hold_with_the_next_request(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    (tmp_path / "s").mkdir()
    async with open_doors(tmp_path / "s", auth=Auth(path)) as cluster:

        async def status(key: str = "") -> int:
            async with cluster.http.get("/v1/models", headers={"x-api-key": key} if key else {}) as response:
                return response.status

        assert await status() == 200  # no file: nobody is told apart
        first, second = keys("add", "ann", path=path), keys("add", "bob", "--priority", "batch", path=path)
        assert [await status(), await status(first), await status(second)] == [401, 200, 200]
        assert keys("revoke", "ann", path=path) == "1 key revoked"
        assert [await status(first), await status(second)] == [401, 200]
        path.write_text("{")
        assert [await status(first), await status(second)] == [401, 401]
        path.unlink()
        assert [await status(), await status(second)] == [401, 401]  # once there were keys, a lost file opens nothing


async def test_web_pages_of_other_hosts_are_refused_without_keys(tmp_path: Path) -> None:
    async with open_doors(tmp_path) as cluster:

        async def status(**headers: str) -> int:
            async with cluster.http.get("/v1/models", headers=headers) as response:
                return response.status

        for own in ({}, {"Host": "localhost:9"}, {"Origin": "http://localhost:3000"}):
            assert await status(**own) == 200
        evil = "http://evil.example"
        for headers in ({"Host": "evil.example"}, {"Origin": evil}, {"Origin": "null"}, {"Host": "a b"}):
            assert await status(**headers) in (400, 403)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "x" / "tenants.json"
    key = keys("add", "ann", "--priority", "interactive", path=path)
    other = keys("add", "ann", path=path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert key not in path.read_text()
    (shown,) = json.loads(keys("list", "--json", path=path))["tenants"]
    assert (shown["name"], shown["priority"], len(shown["keys"])) == ("ann", "interactive", 2)
    assert keys("revoke", "ann", "--key", shown["keys"][0], path=path) == "1 key revoked"
    auth = Auth(path)
    with pytest.raises(Unauthorized):
        auth.tenant(None, key)
    assert auth.tenant(f"Bearer {other}", None).name == "ann"
    for wrong in (("revoke", "bob"), ("revoke", "ann", "--key", "zz"), ("add", "No Name")):
        with pytest.raises(BadTenants):
            keys(*wrong, path=path)
    assert "ann" in keys("list", path=path)


def test_what_the_first_key_changes_is_said(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"

    def said(*arguments: str) -> tuple[str, str]:
        done = CliRunner().invoke(command, [*arguments, "--tenants", str(path)], catch_exceptions=False)
        return done.stdout, done.stderr

    nothing, hint = said("list")
    assert nothing == ""
    assert str(path) in hint
    assert "needs a key" in said("add", "ann")[1]
    assert said("add", "bob")[1] == ""
    assert said("list")[1] == ""
    said("revoke", "ann")
    assert "nobody may use the doors" in said("revoke", "bob")[1]
    assert "needs a key" in said("add", "bob")[1]


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text("{")
    path.chmod(0o600)
    with pytest.raises(BadTenants):
        Auth(path)


def test_a_secret_is_not_in_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    keys("add", "ann", path=path)
    auth: Any = Auth(path)
    with pytest.raises(Unauthorized) as caught:
        auth.tenant("Bearer secret-secret", None)
    assert "secret" not in str(caught.value)
