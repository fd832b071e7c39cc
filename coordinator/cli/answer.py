"""One generation through the public gRPC door, as the command line shows it: text as it comes, or one JSON object.

Not here: who serves. Invariant: the object's `token_ids` are all tokens of the answer, the ending one included (a
chat's own end is not), and `logprobs` has one entry for each when they were asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.channel import Trust
from coordinator.client import Client
from laneproto.v1 import lane_pb2, serve_pb2

REASONS = {
    lane_pb2.FINISH_REASON_STOP: "stop",
    lane_pb2.FINISH_REASON_LENGTH: "length",
    lane_pb2.FINISH_REASON_CANCELLED: "cancelled",
    lane_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(slots=True)
class Collected:
    """A whole answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, object]] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    lane: str = ""
    seed: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """As `generate --json` prints it."""
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "lane": {"name": self.lane, **self.counters},
            "seed": self.seed,
        }


async def ask(
    target: str,
    request: serve_pb2.GenerateRequest,
    on_text: Callable[[str], None],
    *,
    timeout_s: float,
    tls: Trust | None = None,
) -> Collected:
    """The whole answer; `on_text` sees each piece as it comes. Raises what the server said when it refuses."""
    answer = Collected()
    key = os.environ.get("EXPRESSWAY_API_KEY")  # an option would show it to every user of this host
    async with Client(target, api_key=key, tls=tls, tries=1) as client:
        async for event in client.ask(request, timeout_s=timeout_s):
            _take(answer, event, on_text, request.HasField("logprobs"))
    return answer


def _take(
    answer: Collected, event: serve_pb2.GenerateResponse, on_text: Callable[[str], None], with_logprobs: bool
) -> None:
    match event.WhichOneof("event"):
        case "started":
            answer.lane, answer.seed = event.started.lane, event.started.seed
        case "delta":
            answer.token_ids += [token.id for token in event.delta.tokens]
            if with_logprobs:
                answer.logprobs += [_logprob(token) for token in event.delta.tokens]
            answer.text += event.delta.text
            on_text(event.delta.text)
        case "finished":
            done = event.finished
            answer.finish_reason = REASONS.get(done.reason, "error")
            answer.usage = {
                "prompt_tokens": done.usage.prompt_tokens,
                "cached_tokens": done.usage.cached_tokens,
                "completion_tokens": done.usage.completion_tokens,
                "draft_tokens": done.usage.draft_tokens,
                "accepted_draft_tokens": done.usage.accepted_draft_tokens,
            }
            answer.counters = counters(done.counters)


def _logprob(token: lane_pb2.Token) -> dict[str, object]:
    return {"id": token.id, "logprob": token.logprob, "top": [[other.id, other.logprob] for other in token.top]}


def counters(message: lane_pb2.Counters) -> dict[str, int]:
    """All of them as plain numbers, zeros too."""
    names: Sequence[str] = [descriptor.name for descriptor in message.DESCRIPTOR.fields]
    return {name: int(getattr(message, name)) for name in names}
