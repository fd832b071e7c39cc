"""The gRPC door's guard: what the head of a call alone decides, and when its message has to be here.

Every method but the health service needs a key, once there are keys; a method that makes answers has a check of its
own beside it. A call that is refused here takes no message: under overload, what it costs to refuse one is what all
others wait for, and who has no key makes nobody hold 8 MiB. For the same reason a call that says nothing ends in time,
and calls that ask for no answer (health, reflection, lists) hold a part of the door's places only, by method: who
watches without end keeps nobody from a look.

grpc.aio enters no method before its message has come, but one that streams both ways: so all become such.

Not here: whose key (auth), whether there is room (dispatch). Invariant: a method that is added later is guarded
without a word about it here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from coordinator import limits
from coordinator.auth import Auth
from coordinator.doors.rich_error import abort
from coordinator.errors import BadRequest, BodyTimeout, CoordinatorError, QueueFull
from coordinator.tenants import Tenant

_OPEN = "/grpc.health.v1.Health/"

Context: TypeAlias = grpc.aio.ServicerContext
Next: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]
HeadCheck: TypeAlias = Callable[[Mapping[str, str], Tenant], None]  # raises the refusal


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """One per door; `checks` of the methods that make answers, by full name."""

    def __init__(self, auth: Auth, checks: Mapping[str, HeadCheck] = MappingProxyType({})) -> None:
        self._auth = auth
        self._checks = checks
        self._others: Counter[str] = Counter()  # running calls of the methods that make none

    async def intercept_service(self, continuation: Next, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The method, or a refusal in its place."""
        handler = await continuation(details)
        if handler is None:
            return handler
        check = self._checks.get(details.method)
        try:
            if not details.method.startswith(_OPEN):
                head = {name: value for name, value in details.invocation_metadata or () if isinstance(value, str)}
                tenant = self._auth.tenant(head.get("authorization"), head.get("x-api-key"))
                if check:
                    check(head, tenant)
        except CoordinatorError as error:
            return _streaming(_refusing(error))
        if handler.request_streaming:
            return _streaming(self._counted(details.method, handler.stream_stream), handler)
        run = _reading(handler)
        return _streaming(run if check else self._counted(details.method, run), handler)

    def _counted(self, method: str, run: Callable[[Any, Context], Any]) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def counted(asked: Any, context: Context) -> AsyncIterator[Any]:
            if self._others[method] >= limits.GRPC_OTHER_CALLS:
                await abort(context, QueueFull(f"all {limits.GRPC_OTHER_CALLS} places of calls like this are taken"))
            self._others[method] += 1
            try:
                async with aclosing(run(asked, context)) as answers:
                    async for answer in answers:
                        yield answer
            finally:
                self._others[method] -= 1

        return counted


def _streaming(run: Callable[[Any, Context], Any], like: grpc.RpcMethodHandler | None = None) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(
        run, like and like.request_deserializer, like and like.response_serializer
    )


def _refusing(error: CoordinatorError) -> Callable[[Any, Context], Awaitable[None]]:
    async def refuse(_: Any, context: Context) -> None:
        await abort(context, error)

    return refuse


def _reading(handler: grpc.RpcMethodHandler) -> Callable[[Any, Context], AsyncIterator[Any]]:
    """A method of one message, as one that reads it itself."""

    async def run(_: Any, context: Context) -> AsyncIterator[Any]:
        request = await _message(context)
        if handler.response_streaming:
            await handler.unary_stream(request, context)  # which writes its answers itself
        else:
            yield await handler.unary_unary(request, context)

    return run


async def _message(context: Context) -> Any:
    error: CoordinatorError
    try:
        async with asyncio.timeout(limits.BODY_READ_S):
            found = await context.read()
        if found is not grpc.aio.EOF:
            return found
        error = BadRequest("the call has no message")
    except TimeoutError:
        error = BodyTimeout(f"the message did not arrive within {limits.BODY_READ_S:g} s")
    except DecodeError:
        error = BadRequest("the message is not of this method's type")
    await abort(context, error)
