"""One question to a running cluster over its public gRPC door, with every token's stamp kept.

Not here: how many agents ask and how often (demo). Stamps are the lane's own monotonic clock, which all processes of
a host share, so answers of several lanes can be aligned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from bench.aligned import Stamp, Stream
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc

REASONS = {
    lane_pb2.FINISH_REASON_STOP: "stop",
    lane_pb2.FINISH_REASON_LENGTH: "length",
    lane_pb2.FINISH_REASON_CANCELLED: "cancelled",
    lane_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought: times in seconds of the client's monotonic clock, stamps of the lane's."""

    session: str
    lane: str
    text: str
    begin_s: float
    ttft_s: float | None
    end_s: float
    stamps_s: tuple[float, ...]
    finish_reason: str

    @property
    def stream(self) -> Stream:
        """The request as the aggregate sees it."""
        end = max([self.end_s, *self.stamps_s])
        return Stream(min([self.begin_s, *self.stamps_s]), end, tuple(Stamp(t) for t in self.stamps_s))


async def ask(
    channel: grpc.aio.Channel,
    prompt: str,
    *,
    session: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Sends `prompt`, as text or as a turn answered without thinking, and returns the whole answer.

    `on_text` sees each piece as it comes.

    Raises grpc.aio.AioRpcError when the server refuses.
    """
    request = serve_pb2.GenerateRequest(max_tokens=max_tokens, temperature=temperature, seed=seed, session=session)
    if chat:
        request.chat.messages.add(role="user", content=prompt)
        request.chat.reasoning_effort = "none"
    else:
        request.text = prompt
    lane, reason, pieces, stamps = "", "error", [], []
    begin = time.monotonic()
    first: float | None = None
    async for event in serve_pb2_grpc.ExpresswayStub(channel).Generate(request):
        kind = event.WhichOneof("event")
        if kind == "started":
            lane = event.started.lane
        elif kind == "delta":
            if event.delta.tokens and first is None:
                first = time.monotonic() - begin
            stamps += [t.stamp_ns / 1e9 for t in event.delta.tokens]
            pieces.append(event.delta.text)
            on_text(event.delta.text)
        elif kind == "finished":
            lane, reason = event.finished.lane or lane, REASONS.get(event.finished.reason, "error")
    return Answer(session, lane, "".join(pieces), begin, first, time.monotonic(), tuple(stamps), reason)


def ask_now(channel: grpc.Channel, prompt: str, *, max_tokens: int, timeout_s: float = 300.0) -> tuple[float, ...]:
    """The same without an event loop: greedy, not ended by the model; the lane's stamps in seconds.

    Raises grpc.RpcError when the server refuses.
    """
    request = serve_pb2.GenerateRequest(text=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    stamps: list[float] = []
    for event in serve_pb2_grpc.ExpresswayStub(channel).Generate(request, timeout=timeout_s, wait_for_ready=True):
        if event.WhichOneof("event") == "delta":
            stamps += [token.stamp_ns / 1e9 for token in event.delta.tokens]
    return tuple(stamps)
