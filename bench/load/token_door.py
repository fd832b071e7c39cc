"""One request in token ids over the public gRPC door, with the time of every piece as it arrived here.

For models whose text says nothing: a synthetic one (bench.synthetic) answers along its walk, most of whose tokens no
tokenizer has. Not here: texts (door), which ids (walked).
Invariant: as of `door`, `ask` always returns a `Reply`; and an answer that does not follow the walk, where one is
given, is an error, so no figure is of a lane that computed something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format

from bench.load.door import NO_LANE, Reply
from bench.load.workloads import Text
from laneproto.v1 import lane_pb2, serve_pb2, serve_pb2_grpc

ERROR_CODE_KEY = "expressway-error-code"  # of a refusal, in its trailing metadata
ASTRAY = "not_the_walk"


@dataclass(frozen=True, slots=True)
class TokenServer:
    """Where to ask: HOST:PORT or unix:PATH, the model's name there, a key; `follow` gives the one right answer."""

    address: str
    model: str
    key: str | None = None
    fixed_length: bool = True
    follow: Callable[[int, int], Sequence[int]] | None = None  # (last id, tokens) -> ids

    @property
    def url(self) -> str:
        """As a report names it."""
        return f"grpc://{self.address}"

    def client(self) -> grpc.aio.Channel:
        """One connection for all requests."""
        return grpc.aio.insecure_channel(self.address)

    def metadata(self, session: str) -> tuple[tuple[str, str], ...]:
        """Of every request."""
        key = (("authorization", f"Bearer {self.key}"),) if self.key else ()
        return (*((("x-session-id", session),) if session else ()), *key)

    async def ask(
        self,
        client: grpc.aio.Channel,
        messages: Sequence[Mapping[str, Text]],
        *,
        key: str,
        session: str,
        max_tokens: int,
        timeout_s: float,
    ) -> Reply:
        """Sends the ids of all messages one after another and waits for the end of the answer."""
        prompt = [int(token) for message in messages for token in message["content"]]
        request = serve_pb2.GenerateRequest(
            token_ids=serve_pb2.TokenIds(ids=prompt), max_tokens=max_tokens, temperature=0.0, seed=1,
            ignore_eos=self.fixed_length or None,
        )  # fmt: skip
        pieces: list[tuple[float, int]] = []
        ids: list[int] = []
        lane, finished, error = "", serve_pb2.Finished(), None
        begin_s = time.monotonic()
        try:
            stub = serve_pb2_grpc.ExpresswayStub(client)
            async for event in stub.Generate(request, timeout=timeout_s, metadata=self.metadata(session)):
                lane = event.started.lane or event.finished.lane or lane
                if event.delta.tokens:
                    pieces.append((time.monotonic(), len(event.delta.tokens)))
                    ids += [token.id for token in event.delta.tokens]
                if event.HasField("finished"):
                    finished = event.finished
            error = _ended(finished)
            if error is None and self.follow is not None and ids != list(self.follow(prompt[-1], len(ids))):
                error = ASTRAY
        except grpc.aio.AioRpcError as refused:
            error = _code(refused)
        return Reply(
            key=key,
            lane=lane or NO_LANE,
            begin_s=begin_s,
            end_s=time.monotonic(),
            pieces=tuple(pieces),
            prompt_tokens=finished.usage.prompt_tokens,
            cached_tokens=finished.usage.cached_tokens,
            counters={
                name: int(value)
                for name, value in json_format.MessageToDict(
                    finished.counters, preserving_proto_field_name=True
                ).items()
            },
            text=tuple(ids),
            error=error,
        )

    async def told(self) -> dict[str, Any]:
        """What the server says of its model and lanes. Raises OSError when nobody answers as such a server."""
        try:
            async with self.client() as channel:
                stub, metadata = serve_pb2_grpc.ExpresswayStub(channel), self.metadata("")
                model = (await stub.GetModel(serve_pb2.GetModelRequest(), metadata=metadata, timeout=10.0)).model
                lanes = (await stub.ListLanes(serve_pb2.ListLanesRequest(), metadata=metadata, timeout=10.0)).lanes
        except grpc.aio.AioRpcError as error:
            raise OSError(f"{self.url}: {_code(error)}") from None
        return {
            "model": model.name,
            "pack": {
                "fingerprint": model.fingerprint.hex(),
                "format": model.expert_format,
                "region_bytes": model.region_bytes,
            },
            "lanes": {
                lane.lane: {"device": lane.device, "cache_bytes": lane.counters.cache_budget_bytes} for lane in lanes
            },
        }


def _ended(finished: serve_pb2.Finished) -> str | None:
    if finished.reason == lane_pb2.FINISH_REASON_UNSPECIFIED:
        return "stream_cut"
    if finished.reason in (lane_pb2.FINISH_REASON_STOP, lane_pb2.FINISH_REASON_LENGTH):
        return None
    return finished.error_code or "cancelled"


def _code(error: grpc.aio.AioRpcError) -> str:
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_CODE_KEY:
            return str(value)
    return str(error.code().name).lower()
