"""The public gRPC door: `serve.proto`, health and reflection.

Not here: what a request may say (request), where it runs (dispatch). Invariants: events in order Started, Delta…,
exactly one Finished (with ERROR and a stable code when the lane was lost); before Started, one gRPC error with
its details; a call that its client cancelled, or whose deadline passed, leaves queue and lane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, TypeAlias

import grpc.aio
import structlog

from coordinator import limits
from coordinator.answer import Answer, Final, Piece
from coordinator.apis.grpc_chat import parse_grpc_chat, said_delta
from coordinator.auth import Auth
from coordinator.chat import Said, TurnEnd, TurnReader, begin_turn
from coordinator.doors.caller import parse_caller
from coordinator.doors.guard import HeadCheck
from coordinator.doors.refusals import new_request_id
from coordinator.doors.rich_error import abort
from coordinator.errors import BadRequest, CoordinatorError, InternalError, SlowReader
from coordinator.generation import Begun
from coordinator.policy.host_names import host_of
from coordinator.request import Draft, check_session
from coordinator.sampling import Defaults, Wanted
from coordinator.serving import Serving
from coordinator.tenants import Tenant
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc

SERVICE = serve_pb2.DESCRIPTOR.services_by_name["Expressway"].full_name
GENERATE = f"/{SERVICE}/Generate"

_log = structlog.get_logger("grpc")


def server_options() -> list[tuple[str, int]]:
    """Bounds of a connection, and how one that went silent is found out."""
    ping_ms, wait_ms = round(1e3 * limits.GRPC_PING_S), round(1e3 * limits.GRPC_PING_TIMEOUT_S)
    return [
        *_BOUNDS,
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", wait_ms),
        ("grpc.http2.ping_timeout_ms", wait_ms),  # the one that counts: its default is a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(1e3 * limits.GRPC_CLIENT_PING_S)),
    ]


_BOUNDS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_BYTES),
    ("grpc.max_metadata_size", limits.GRPC_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", limits.GRPC_METADATA_BYTES),
    ("grpc.max_concurrent_streams", limits.GRPC_STREAMS_PER_CONNECTION),
    ("grpc.so_reuseport", 0),  # a second server on the same port is refused instead of sharing it
    # Without these two, gRPC takes over 100,000 messages for a client that stopped reading.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 * limits.KIB),
]

_GREEDY = Defaults(temperature=0.0)  # a program that names no temperature wants the same answer twice
_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

Context: TypeAlias = grpc.aio.ServicerContext


class ExpresswayServicer(serve_pb2_grpc.ExpresswayServicer):
    """The service on one `Serving`."""

    def __init__(self, serving: Serving, auth: Auth | None = None) -> None:
        self._serving = serving
        self._auth = auth or serving.auth  # of the door that this is

    def head_checks(self) -> dict[str, HeadCheck]:
        """For the door's guard: what is refused before its message is read."""
        return {GENERATE: self._check_head}

    def _check_head(self, head: Mapping[str, str], tenant: Tenant) -> None:
        """A head's own mistakes, then room. Raises what it finds."""
        try:
            parse_caller(head, "", tenant)
            self._serving.dispatcher.check_open(tenant)
        except CoordinatorError as error:
            self._serving.recorder.request("grpc", error.code)
            raise

    async def Generate(self, request: serve_pb2.GenerateRequest, context: Context) -> None:
        """One generation."""
        request_id = new_request_id()
        answer: Answer | None = None
        try:
            reader = await self._submit(request, context, request_id)
            answer = reader.answer if isinstance(reader, TurnReader) else reader
            try:
                await _stream(reader, answer, context)
            finally:
                answer.cancel()
        except CoordinatorError as error:
            await self._refuse(context, error, answer)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            _log.exception("generate failed", request_id=request_id)
            await self._refuse(context, InternalError("internal error"), answer)

    async def ListLanes(self, request: serve_pb2.ListLanesRequest, context: Context) -> serve_pb2.ListLanesReply:
        """The lanes as the coordinator sees them."""
        running = self._serving.dispatcher.running
        return serve_pb2.ListLanesReply(
            lanes=[
                serve_pb2.LaneInfo(
                    lane=view.name,
                    state="busy" if view.state == "ready" and running(view.name) else view.state,
                    pid=view.pid,
                    device=view.device,
                    counters=view.counters,
                    restarts=view.restarts,
                    running=running(view.name),
                    host=host_of(view.name),
                )
                for view in self._serving.lanes()
            ],
            queued=self._serving.dispatcher.queued,
        )

    async def GetModel(self, request: serve_pb2.GetModelRequest, context: Context) -> serve_pb2.GetModelReply:
        """The served model."""
        try:
            return serve_pb2.GetModelReply(model=self._serving.model().to_wire())
        except CoordinatorError as error:
            await abort(context, error)

    async def _refuse(self, context: Context, error: CoordinatorError, answer: Answer | None) -> NoReturn:
        if answer is None:  # it never got as far as the queue; an answer records its own end
            self._serving.recorder.request("grpc", error.code)
        await abort(context, error)

    async def _submit(
        self, request: serve_pb2.GenerateRequest, context: Context, request_id: str
    ) -> Answer | TurnReader:
        serving = self._serving
        head = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        tenant = self._auth.tenant(head.get("authorization"), head.get("x-api-key"))
        caller = parse_caller(head, request_id, tenant)
        if not caller.session and request.session:
            caller = replace(caller, session=check_session(request.session))
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise BadRequest("a prompt is required: text, token_ids or chat", param="prompt")
        serving.dispatcher.check_open(tenant)  # while the message came, others may have taken the last place
        match kind:
            case "text":
                model = serving.model()
                prompt_ids: Sequence[int] = await serving.text.encode_text(
                    request.text, context_tokens=model.context_tokens
                )
            case "token_ids":
                prompt_ids = request.token_ids.ids
            case "chat":
                ask = await serving.text.off_loop(
                    request.ByteSize(), limits.INLINE_PARSE_BYTES, lambda: parse_grpc_chat(request, wanted_of(request))
                )
                return await begin_turn(serving, ask, caller, door="grpc", defaults=_GREEDY)
        draft = Draft(
            prompt_ids=prompt_ids,
            prompt_param="prompt",
            default_seed=serving.new_seed(),
            defaults=_GREEDY,
            wanted=wanted_of(request),
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            stops=tuple(request.stop),
            stop_ids=tuple(request.stop_ids),
            end_ids=serving.generation.end_ids,
            ignore_eos=request.ignore_eos,
            logprobs=request.HasField("logprobs"),
            top_logprobs=request.logprobs if request.HasField("logprobs") else 0,
            top_logprobs_param="logprobs",
            session=caller.session,
            parent_session=caller.parent_session,
            tenant=caller.tenant,
            priority=caller.priority,
            timeout_s=caller.timeout_s,
        )
        return await serving.submit(draft, caller, "grpc")


async def _stream(reader: Answer | TurnReader, answer: Answer, context: Context) -> None:
    while True:
        try:
            event = await reader.read()
        except CoordinatorError as error:
            if answer.generation.lane is None:
                raise
            await _write(context, serve_pb2.GenerateResponse(finished=_failed(answer, error)))
            return
        match event:
            case Begun(lane):
                started = serve_pb2.Started(
                    request_id=answer.request.id,
                    lane=lane,
                    seed=answer.request.sampling.seed,
                    prompt_tokens=len(answer.request.prompt_ids),
                )
                await _write(context, serve_pb2.GenerateResponse(started=started))
            case Piece(text, tokens):
                delta = serve_pb2.Delta(text=text, tokens=[entry.token for entry in tokens])
                await _write(context, serve_pb2.GenerateResponse(delta=delta))
            case Said():
                await _write(context, serve_pb2.GenerateResponse(delta=said_delta(event)))
            case Final() | TurnEnd():
                final = event.final if isinstance(event, TurnEnd) else event
                finished = serve_pb2.Finished(
                    reason=final.reason, usage=final.usage, counters=final.counters, lane=final.lane
                )
                await _write(context, serve_pb2.GenerateResponse(finished=finished))
                return


def wanted_of(request: serve_pb2.GenerateRequest) -> Wanted:
    """How tokens are to be drawn."""
    said = {name: getattr(request, name) for name in _SAMPLING_FIELDS if request.HasField(name)}
    return Wanted(logit_bias=request.logit_bias, **said)


def _failed(answer: Answer, error: CoordinatorError) -> serve_pb2.Finished:
    """Once begun, an error is the last event."""
    return serve_pb2.Finished(
        reason=lane_pb2.FINISH_REASON_ERROR,
        usage=answer.usage(),
        lane=answer.generation.lane or "",
        error_code=error.code,
        error_message=error.message,
    )


async def _write(context: Context, response: serve_pb2.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(limits.WRITE_STALL_S):
            await context.write(response)
    except TimeoutError:
        raise SlowReader("the client stopped reading") from None
