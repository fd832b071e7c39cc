"""Schemathesis against the HTTP door's own description: nothing that it makes up brings a 5xx or another shape.

EXPRESSWAY_OPENAPI_EXAMPLES is the number of requests of each kind for each route (12; more by hand).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fakes.doors import Cluster, open_doors, thinking_dir
from tests.fakes.lane import Script

pytestmark = pytest.mark.conformance
EXAMPLES = int(os.environ.get("EXPRESSWAY_OPENAPI_EXAMPLES", "12"))
CHECKS = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
ROUTES = [
    ("GET", "/healthz"), ("GET", "/openapi.json"), ("GET", "/v1/models"), ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses"),
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Open doors in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    folder, script = tmp_path_factory.mktemp("doors"), Script(tokens=(60, 61, 2))
    stack = contextlib.AsyncExitStack()
    try:
        yield call(stack.enter_async_context(open_doors(folder, lanes=1, script=script, text_from=thinking_dir())))
    finally:
        call(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def described(cluster: Cluster) -> Any:
    document = requests.get(f"http://{cluster.doors.http}/openapi.json", timeout=60).json()
    found = schemathesis.openapi.from_dict(document)
    found.config.update(base_url=f"http://{cluster.doors.http}")
    return found


def test_every_route_is_described(cluster: Cluster, described: Any) -> None:
    assert (
        sorted((operation.ok().method.upper(), operation.ok().path) for operation in described.get_all_operations())
        == ROUTES
    )
    app = cluster.doors._runner.app
    assert app is not None
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    assert served - {("HEAD", path) for _, path in served} == set(ROUTES)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*route, GenerationMode.POSITIVE) for route in ROUTES),
        *((*route, GenerationMode.NEGATIVE) for route in ROUTES if route[0] == "POST"),
    ],
)
def test_no_server_error_and_no_other_shape(described: Any, method: str, path: str, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    session = requests.Session()

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        response = case.call(session=session, timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    answered()
    assert statuses
    if mode is GenerationMode.NEGATIVE:
        assert statuses[400], "nothing was wrong with what was made up"
