"""Errors as HTTP answers, in the shape of the API that was asked; also of requests that were not even HTTP.

aiohttp answers the latter itself, in plain text that quotes the request; `ShapedRunner` makes them answers like all
others, and so those of the page.

Not here: which errors there are (errors). Invariant: every answer of the HTTP door that is no 200 is JSON, with our
code in it; no answer holds anything of a request that could not be read.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from coordinator import limits
from coordinator.apis.anthropic import answers as anthropic
from coordinator.apis.openai.answers import error_body
from coordinator.apis.writer import dump
from coordinator.errors import (
    BadRequest,
    BodyTooLarge,
    CoordinatorError,
    InternalError,
    MethodNotAllowed,
    RouteNotFound,
)

MESSAGES = "/v1/messages"  # the one path, with those below it, whose errors have another shape
_PEEK_BYTES = 64  # of what is not HTTP: enough to see a method and the beginning of a path
REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_REQUEST_ID_HEADER = "request-id"

_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Shape: TypeAlias = Callable[[CoordinatorError, str], web.Response]  # of an error, and the path that was asked


def new_request_id() -> str:
    """Made by the server, never by a client."""
    return secrets.token_hex(12)


def json_response(value: dict[str, Any], status: int = 200) -> web.Response:
    """One JSON object."""
    return web.Response(body=dump(value).encode(), status=status, content_type="application/json")


def error_response(error: CoordinatorError, path: str, request_id: str) -> web.Response:
    """The answer to an error at `path`."""
    if path.startswith(MESSAGES):
        response = json_response(anthropic.error_body(error, request_id), status=anthropic.error_status(error))
    else:
        response = json_response(error_body(error), status=error.http)
    if error.http == 401:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if error.retryable:
        response.headers[hdrs.RETRY_AFTER] = str(math.ceil(error.retry_after_s or limits.RETRY_AFTER_S))
    response.headers.update(id_headers(path, request_id))
    return response


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """The server's own id of a request, under the names that clients of the API look for."""
    names = (REQUEST_ID_HEADER, ANTHROPIC_REQUEST_ID_HEADER) if path.startswith(MESSAGES) else (REQUEST_ID_HEADER,)
    return dict.fromkeys(names, request_id)


def typed(found: web.HTTPException) -> CoordinatorError:
    """What aiohttp refuses, as an error of ours."""
    match found:
        case web.HTTPNotFound():
            return RouteNotFound("no such path")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"allowed here: {', '.join(sorted(found.allowed_methods))}")
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLarge(f"a body has at most {limits.BODY_BYTES} bytes")
        case _:
            return BadRequest("the request could not be read")


def of_the_api(error: CoordinatorError, path: str) -> web.Response:
    """An error of a request that has no id yet."""
    return error_response(error, path, new_request_id())


class ShapedRunner(web.AppRunner):
    """An application whose answers all have one shape: that of their API, unless another one is given."""

    def __init__(self, app: web.Application, *, shape: Shape = of_the_api, **more: Any) -> None:
        super().__init__(app, **more)
        self._shape = shape

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            self._shape,
            _shaped(made.request_handler, self._shape),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


class _Server(web.Server):
    def __init__(self, shape: Shape, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._shape = shape

    def __call__(self) -> RequestHandler:
        return _Connection(self._shape, self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ("_line", "_shape")

    def __init__(self, shape: Shape, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._shape = shape

    def data_received(self, data: bytes) -> None:
        self._line = data[:_PEEK_BYTES]  # what is not HTTP has no path but this
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        response = super().handle_error(request, status, exc, message)  # it logs, and knows what is too late
        assert isinstance(response, web.Response)
        path = self._line.partition(b" ")[2].partition(b" ")[0].decode("latin-1")
        error = (
            BadRequest("the request is not HTTP as this server reads it")
            if status < 500
            else InternalError("internal error")
        )
        shaped = self._shape(error, path)
        shaped.headers[hdrs.SERVER] = "expressway"
        shaped.force_close()
        return shaped


def _shaped(handle: _Handle, shape: Shape) -> _Handle:
    """What an application refuses before its middlewares see it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as found:
            return shape(typed(found), request.path)

    return answer
