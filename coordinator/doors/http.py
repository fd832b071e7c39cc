"""The HTTP door: routes, bodies, headers, errors. One aiohttp application on the coordinator's event loop.

Not here: what bodies mean (openai), how answers are sent (completions). Invariants: every answer but a stream is JSON,
errors included, in OpenAI's shape; a body is read up to its limit and within its time; what a client names itself is
echoed only after a check.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import hdrs, web

from coordinator import limits
from coordinator.apis.anthropic.bodies import MessagesBody, parse_counted
from coordinator.apis.json_body import parse_json
from coordinator.apis.openai.answers import model_card
from coordinator.apis.openapi import Route, describe
from coordinator.doors.answering import QUEUED_KEY, respond
from coordinator.doors.caller import parse_caller
from coordinator.doors.endpoints import ENDPOINTS
from coordinator.doors.origin import LOCAL_NAMES, is_local
from coordinator.doors.refusals import (
    MESSAGES,
    REQUEST_ID_HEADER,
    error_response,
    id_headers,
    json_response,
    new_request_id,
    typed,
)
from coordinator.errors import (
    BodyTimeout,
    BodyTooLarge,
    CoordinatorError,
    Forbidden,
    InternalError,
    MediaType,
)
from coordinator.serving import Serving
from coordinator.tenants import Tenant

CLIENT_REQUEST_ID_HEADER = "x-client-request-id"
HEALTHZ = "/healthz"
OPENAPI = "/openapi.json"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"

_REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
_TENANT_KEY: web.RequestKey[Tenant] = web.RequestKey("tenant", Tenant)
_CLIENT_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:/+=-]{{1,{limits.CLIENT_REQUEST_ID_CHARS}}}")

_log = structlog.get_logger("http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(serving: Serving, *, started: int) -> web.Application:
    """The application; `started` (seconds since 1970) dates the model."""
    door = _Door(serving, started)
    app = web.Application(client_max_size=limits.BODY_BYTES, middlewares=[door.around])
    app.on_response_prepare.append(_name_server)
    app.router.add_get(HEALTHZ, door.healthz)
    app.router.add_get(OPENAPI, door.openapi)
    app.router.add_get("/v1/models", door.models)
    app.router.add_get("/v1/models/{name:.+}", door.model)
    app.router.add_post(COUNT_TOKENS, door.count_tokens)
    for path in ENDPOINTS:
        app.router.add_post(path, door.answer)
    return app


ROUTES = (
    Route("get", HEALTHZ, "Whether a lane is ready.", needs_key=False, statuses={"503": "none is"}),
    Route("get", OPENAPI, "This description."),
    Route("get", "/v1/models", "The model that is served."),
    Route("get", "/v1/models/{name}", "The model that is served, by name."),
    Route("post", COUNT_TOKENS, "How many tokens a prompt has.", MessagesBody, anthropic=True),
    *(
        Route("post", path, endpoint.summary, endpoint.body, streams=True, anthropic=path == MESSAGES)
        for path, endpoint in ENDPOINTS.items()
    ),
)


class _Door:
    def __init__(self, serving: Serving, started: int) -> None:
        self._serving = serving
        self._started = started

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ids, and errors as JSON."""
        request_id = request[_REQUEST_ID_KEY] = new_request_id()
        try:
            self._admit(request)
            response = await handler(request)
        except CoordinatorError as error:
            response = self._refused(request, error)
        except web.HTTPException as found:
            response = self._refused(request, typed(found))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            _log.exception("request failed", request_id=request_id, path=request.match_info.route.name)
            response = self._refused(request, InternalError("internal error"))
        if not response.prepared:
            response.headers.update(_id_headers(request))
        return response

    def _admit(self, request: web.Request) -> None:
        """Before anything of a route: default-deny, so that a route that is added later is guarded too."""
        headers, auth = request.headers, self._serving.auth
        if request.path == HEALTHZ:
            return
        if not auth.required and not is_local(headers.get(hdrs.HOST), headers.get(hdrs.ORIGIN), LOCAL_NAMES):
            raise Forbidden("without keys, this server answers to names of its own host only")
        request[_TENANT_KEY] = auth.tenant(headers.get(hdrs.AUTHORIZATION), headers.get("x-api-key"))

    def _refused(self, request: web.Request, error: CoordinatorError) -> web.Response:
        """The answer to an error; a request for an answer that never got as far as the queue is recorded here."""
        if request.method == hdrs.METH_POST and request.path in ENDPOINTS and not request.get(QUEUED_KEY):
            self._serving.recorder.request("http", error.code)
        return error_response(error, request.path, request[_REQUEST_ID_KEY])

    async def healthz(self, request: web.Request) -> web.Response:
        """Whether a lane is ready; nothing else."""
        if self._serving.ready():
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable"}, status=503)

    async def openapi(self, request: web.Request) -> web.Response:
        """What this door takes."""
        return json_response(document())

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        card = self._card()
        more = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}  # what Anthropic's clients look for
        return json_response({"object": "list", "data": [card], **more})

    async def model(self, request: web.Request) -> web.Response:
        """The one model, by name."""
        self._serving.check_model(request.match_info["name"])
        return json_response(self._card())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """POST to one of the `ENDPOINTS`."""
        endpoint = ENDPOINTS[request.path]
        caller = parse_caller(request.headers, request[_REQUEST_ID_KEY], request[_TENANT_KEY])
        _check_head(request)
        if request.content_length is None or request.content_length > limits.SMALL_BODY_BYTES:
            self._serving.dispatcher.check_open(request[_TENANT_KEY])  # the body is not even read
        asked = await self._read(request, lambda data: endpoint.parse(parse_json(data)))
        self._serving.dispatcher.check_open(request[_TENANT_KEY])  # nothing is made of it
        answering = await endpoint.begin(self._serving, asked, caller)
        return await respond(answering.turn, answering.writer, request, _id_headers(request), stream=answering.stream)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens: the prompt is made, and nothing is asked of a lane."""
        _check_head(request)
        asked = await self._read(request, lambda data: parse_counted(parse_json(data)))
        self._serving.check_model(asked.model)
        # what is too long for the context is what a client wants to know; the body bounds the work
        ids = await self._serving.text.encode_chat(asked.conversation, context_tokens=limits.BODY_BYTES)
        return json_response({"input_tokens": len(ids)})

    def _card(self) -> dict[str, Any]:
        model = self._serving.model()
        return model_card(model.name, self._started, model.context_tokens)

    async def _read(self, request: web.Request, parse: Callable[[bytes], Any]) -> Any:
        try:
            async with asyncio.timeout(limits.BODY_READ_S):
                data = await request.read()
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {limits.BODY_READ_S:g} s") from None
        return await self._serving.text.off_loop(len(data), limits.INLINE_PARSE_BYTES, lambda: parse(data))


def _check_head(request: web.Request) -> None:
    """What the head alone says of a body that is not taken."""
    if request.content_type != "application/json":  # also keeps web pages of other origins from posting unasked
        raise MediaType("the content type must be application/json")
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise MediaType("compressed bodies are not accepted")
    if request.content_length is not None and request.content_length > limits.BODY_BYTES:
        raise BodyTooLarge(f"a body has at most {limits.BODY_BYTES} bytes")


@functools.cache
def document() -> dict[str, Any]:
    """The door as OpenAPI."""
    return describe(ROUTES, importlib.metadata.version("expressway"))


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "expressway"  # and no versions


def _id_headers(request: web.Request) -> dict[str, str]:
    headers = id_headers(request.path, request[_REQUEST_ID_KEY])
    named = request.headers.get(REQUEST_ID_HEADER, "")
    if _CLIENT_REQUEST_ID.fullmatch(named):
        headers[CLIENT_REQUEST_ID_HEADER] = named
    return headers
