"""A checked request: only what `parse` returns can reach the engine.

Invariant: every token id is in the vocabulary, at least one output token fits the context, every number is finite and
in range; `max_tokens` is already clipped to what the context leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneproto.v1 import lane_pb2 as pb
from lanes import limits
from lanes.errors import BadSampling, ContextExceeded, EmptyPrompt, RequestError, TokenOutOfRange, TooManyStopIds


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one lane can serve."""

    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0


def parse(message: pb.GenerateRequest, bounds: Bounds) -> Request:
    """The checked request of a message; raises a RequestError."""
    request_id = message.request_id
    if not 1 <= len(request_id) <= limits.MAX_REQUEST_ID_CHARACTERS or not _is_plain(request_id):
        raise RequestError(f"request_id: 1 to {limits.MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
    prompt_ids = tuple(message.prompt_ids)
    if not prompt_ids:
        raise EmptyPrompt("prompt_ids: at least one token")
    room = bounds.context_tokens - len(prompt_ids)
    if room < 1:
        raise ContextExceeded(
            f"prompt_ids: {len(prompt_ids)} tokens; the context of {bounds.context_tokens} holds at most "
            f"{bounds.context_tokens - 1} and one of output"
        )
    _check_ids("prompt_ids", prompt_ids, bounds.vocab_size)
    if len(message.stop_ids) > limits.MAX_STOP_IDS:
        raise TooManyStopIds(f"stop_ids: {len(message.stop_ids)}, at most {limits.MAX_STOP_IDS}")
    _check_ids("stop_ids", tuple(message.stop_ids), bounds.vocab_size)
    if message.max_tokens < 1:
        raise RequestError("max_tokens: at least 1")
    if message.top_logprobs > limits.MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs: {message.top_logprobs}, at most {limits.MAX_TOP_LOGPROBS}")
    if message.top_logprobs and not message.logprobs:
        raise RequestError("top_logprobs: needs logprobs")
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=min(message.max_tokens, room),
        sampling=_sampling(message.sampling),
        stop_ids=frozenset(message.stop_ids),
        logprobs=message.logprobs,
        top_logprobs=min(message.top_logprobs, bounds.vocab_size),
    )


def _sampling(message: pb.Sampling) -> Sampling:
    if not (math.isfinite(message.temperature) and 0.0 <= message.temperature <= limits.MAX_TEMPERATURE):
        raise BadSampling(f"temperature: a number from 0 to {limits.MAX_TEMPERATURE:g}")
    if not (math.isfinite(message.top_p) and 0.0 <= message.top_p <= 1.0):
        raise BadSampling("top_p: a number from 0 to 1")
    return Sampling(message.temperature, message.top_k, message.top_p or 1.0, message.seed)


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and (highest := max(ids)) >= vocab_size:
        raise TokenOutOfRange(f"{name}: {highest} is not below the vocabulary size of {vocab_size}")


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
