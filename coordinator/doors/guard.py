"""The gRPC door's guard: what the head of a call alone decides, before its message is read.

Every method but the health service needs a key, once there are keys; a method may have a check of its own beside it.
A call that is refused here takes no message: under overload, what it costs to refuse one is what all others wait for,
and who has no key makes nobody hold 8 MiB.

Not here: whose key (auth), whether there is room (dispatch). Invariant: a method that is added later is guarded
without a word about it here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
import grpc.aio

from coordinator.auth import Auth
from coordinator.doors.rich_error import abort
from coordinator.errors import CoordinatorError
from coordinator.tenants import Tenant

_OPEN = "/grpc.health.v1.Health/"

Next: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]]
HeadCheck: TypeAlias = Callable[[Mapping[str, str], Tenant], None]  # raises the refusal


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """One per door; `checks` by the full name of their method."""

    def __init__(self, auth: Auth, checks: Mapping[str, HeadCheck] = MappingProxyType({})) -> None:
        self._auth = auth
        self._checks = checks

    async def intercept_service(self, continuation: Next, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The method, or a refusal in its place."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        head = {name: value for name, value in details.invocation_metadata or () if isinstance(value, str)}
        try:
            tenant = self._auth.tenant(head.get("authorization"), head.get("x-api-key"))
            if check := self._checks.get(details.method):
                check(head, tenant)
        except CoordinatorError as error:
            return _refusing(error)
        return handler


def _refusing(error: CoordinatorError) -> grpc.RpcMethodHandler:
    """Of any method: only one that streams both ways is entered before a message has come."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
