"""The gRPC door's guard: every method but the health service needs a key, once there are keys.

Not here: whose key (auth). Invariant: a method that is added later is guarded without a word about it here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from coordinator.auth import Auth
from coordinator.doors.rich_error import abort
from coordinator.errors import Unauthorized

_OPEN = "/grpc.health.v1.Health/"

Next = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """One per door."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth

    async def intercept_service(self, continuation: Next, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The method, or a refusal in its place."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        metadata = {name: value for name, value in details.invocation_metadata or () if isinstance(value, str)}
        try:
            self._auth.tenant(metadata.get("authorization"), metadata.get("x-api-key"))
        except Unauthorized as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: grpc.RpcMethodHandler, error: Unauthorized) -> grpc.RpcMethodHandler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)
