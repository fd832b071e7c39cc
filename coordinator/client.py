"""A small client of the public gRPC door, for Python programs.

    async with Client("127.0.0.1:8001", api_key=key) as client:
        async for event in client.generate("Once upon a time", max_tokens=100):
            print(event.delta.text, end="")

A refusal that may be tried again is tried again, as long as nothing was answered: after the time that the server names,
else after 0.5 s, doubling. Whoever stops iterating cancels the generation.

Not here: chat formats (HTTP). Invariant: an answer that has begun is never begun again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from coordinator.errors import CoordinatorError
from coordinator.fleet.lane_client import ERROR_CODE_KEY
from coordinator.reported import reported
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc

RETRY_AFTER_KEY = "retry-after"
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20))


class Client:
    """One connection; any number of generations at a time. `tries` counts the first one, too."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        session: str | None = None,
        tries: int = 5,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = serve_pb2_grpc.ExpresswayStub(self._channel)
        self._metadata = [
            *((("authorization", f"Bearer {api_key}"),) if api_key else ()),
            *((("x-session-id", session),) if session else ()),
        ]
        self._tries = max(1, tries)
        self._sleep = sleep

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and what still runs on it."""
        await self._channel.close()

    async def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Any
    ) -> AsyncGenerator[serve_pb2.GenerateResponse, None]:
        """Started, Delta…, Finished of one answer; `options` are fields of `GenerateRequest`. The deadline `timeout_s`
        is of each try. Raises a `CoordinatorError` of the server's code, also for an answer that failed midway."""
        if isinstance(prompt, str):
            request = serve_pb2.GenerateRequest(text=prompt, **options)
        else:
            request = serve_pb2.GenerateRequest(token_ids=serve_pb2.TokenIds(ids=prompt), **options)
        wait_s = FIRST_WAIT_S
        for left in range(self._tries - 1, -1, -1):
            begun = False
            try:
                async for event in self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata):
                    begun = True
                    yield event
                    if event.finished.reason == lane_pb2.FINISH_REASON_ERROR:
                        raise reported(event.finished.error_code, event.finished.error_message)
                return
            except grpc.aio.AioRpcError as error:
                if begun or not left or error.code() not in _AGAIN:
                    raise _typed(error) from error
                named_s = _retry_after(error)
            await self._sleep(min(named_s or wait_s, LONGEST_WAIT_S))
            wait_s *= 2

    async def text(self, prompt: str | Sequence[int], **options: Any) -> str:
        """The whole answer."""
        return "".join([event.delta.text async for event in self.generate(prompt, **options)])

    async def model(self) -> lane_pb2.ModelInfo:
        """What is served."""
        try:
            reply: serve_pb2.GetModelReply = await self._stub.GetModel(
                serve_pb2.GetModelRequest(), metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _typed(error) from error
        return reply.model


def _trailing(error: grpc.aio.AioRpcError) -> Mapping[str, str]:
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}


def _typed(error: grpc.aio.AioRpcError) -> CoordinatorError:
    code = _trailing(error).get(ERROR_CODE_KEY) or error.code().name.lower()
    return reported(code, error.details() or "")


def _retry_after(error: grpc.aio.AioRpcError) -> float | None:
    try:
        return max(0.0, float(_trailing(error)[RETRY_AFTER_KEY]))
    except (KeyError, ValueError):
        return None
