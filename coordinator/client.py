"""A small client of the public gRPC door, for Python programs.

    async with Client("box.example:8001", api_key=key, tls=Trust(Path("ca.pem"))) as client:
        async for event in client.generate("Once upon a time", max_tokens=100):
            print(event.delta.text, end="")
        print(await client.text(serve_pb2.Chat(messages=[serve_pb2.ChatMessage(role="user", content="Hello")])))

A refusal that may be tried again is tried again, as long as nothing was answered: after the time that the server names
(RetryInfo, else `retry-after`), else after 0.5 s, doubling. Whoever stops iterating cancels the generation.

A connection that breaks inside an answer is an `AnswerCut`: retryable, but by the caller, who has tokens of it.

Not here: channels and certificates (channel). Invariant: an answer that has begun is never begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator.channel import Trust, open_channel
from coordinator.doors.rich_error import RETRY_AFTER_KEY
from coordinator.errors import AnswerCut, CoordinatorError
from coordinator.fleet.lane_client import ERROR_CODE_KEY
from coordinator.reported import reported
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
Prompt: TypeAlias = str | Sequence[int] | serve_pb2.Chat  # text, token ids, or turns in the model's chat format
# a connection, inside an answer; CANCELLED is by the other end: what this one cancels never gets as far as an error
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})
_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class Client:
    """One connection; any number of generations at a time. `tries` counts the first one, too.

    Without `tls` a key goes out in clear text: only to a Unix socket or this host. `BadOption` when the certificates
    that `tls` names cannot be used.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        session: str | None = None,
        tls: Trust | None = None,
        tries: int = 5,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._channel = open_channel(target, tls)
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
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Any
    ) -> AsyncGenerator[serve_pb2.GenerateResponse, None]:
        """Started, Delta…, Finished of one answer; `options` are fields of `GenerateRequest`. The deadline `timeout_s`
        is of each try. Raises a `CoordinatorError` of the server's code, also for an answer that failed midway, and
        `AnswerCut`, which says how many tokens had arrived, when the connection breaks inside it."""
        if isinstance(prompt, str):
            request = serve_pb2.GenerateRequest(text=prompt, **options)
        elif isinstance(prompt, serve_pb2.Chat):
            request = serve_pb2.GenerateRequest(chat=prompt, **options)
        else:
            request = serve_pb2.GenerateRequest(token_ids=serve_pb2.TokenIds(ids=prompt), **options)
        async with contextlib.aclosing(self.ask(request, timeout_s=timeout_s)) as events:
            async for event in events:
                yield event

    async def ask(
        self, request: serve_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[serve_pb2.GenerateResponse, None]:
        """The same for a request as it goes over the wire."""
        wait_s = FIRST_WAIT_S
        for left in range(self._tries - 1, -1, -1):
            begun, tokens = False, 0
            try:
                async for event in self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata):
                    begun = True
                    tokens += len(event.delta.tokens)
                    yield event
                    if event.finished.reason == lane_pb2.FINISH_REASON_ERROR:
                        raise reported(event.finished.error_code, event.finished.error_message)
                return
            except grpc.aio.AioRpcError as error:
                if begun and error.code() in _BROKEN and ERROR_CODE_KEY not in _trailing(error):
                    raise AnswerCut(f"the connection broke after {tokens} tokens", tokens=tokens) from error
                if begun or not left or error.code() not in _AGAIN:
                    raise refusal(error) from error
                named_s = _retry_after(error)
            await self._sleep(min(named_s or wait_s, LONGEST_WAIT_S))
            wait_s *= 2

    async def text(self, prompt: Prompt, **options: Any) -> str:
        """The whole answer; of a chat, without its reasoning and its calls."""
        return "".join([event.delta.text async for event in self.generate(prompt, **options)])

    async def model(self) -> lane_pb2.ModelInfo:
        """What is served."""
        try:
            reply: serve_pb2.GetModelReply = await self._stub.GetModel(
                serve_pb2.GetModelRequest(), metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise refusal(error) from error
        return reply.model


def refusal(error: grpc.aio.AioRpcError) -> CoordinatorError:
    """What a gRPC error means, in the server's own stable code where it sent one."""
    said = error.details() or ""
    if code := _trailing(error).get(ERROR_CODE_KEY):
        return reported(code, said)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return reported("unreachable", _unreachable(said))
    return reported(error.code().name.lower(), said)


def _unreachable(said: str) -> str:
    """gRPC names attempts, layers and fields; the last of its words are the reason."""
    if "HTTP/2" in said or "http1" in said:
        return "what answers there does not speak gRPC; the gRPC door has an address of its own (`expressway status`)"
    if "WRONG_VERSION_NUMBER" in said:
        return "what answers there does not speak TLS"
    if "CERTIFICATE_VERIFY_FAILED" in said or "Verification Check failed" in said:
        why = (
            "it is of another name" if "Hostname" in said else said.partition("VERIFY_FAILED: ")[2].removesuffix(": OK")
        )
        return f"the certificate of what answers there is not trusted: {why[:200]}"
    if said.endswith(": Socket closed"):
        return "what answers there closed the connection; it may speak TLS only"
    reason = said.rpartition(": ")[2].rpartition("address lookup failed for ")[2].strip("[] ")
    return f"nobody answers there: {reason[:200] or 'no reason given'}"


def _trailing(error: grpc.aio.AioRpcError) -> Mapping[str, str]:
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}


def _retry_after(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds that the server names; None where it names none, or nothing that can be read."""
    info = error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)
        if status is not None and any(detail.Unpack(info) for detail in status.details):
            return max(0.0, float(info.retry_delay.ToMilliseconds()) / 1000)
        return max(0.0, float(_trailing(error)[RETRY_AFTER_KEY]))
    except (KeyError, ValueError, OverflowError, DecodeError):
        return None
