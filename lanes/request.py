"""A checked request: only what `parse` returns can reach the engine.

Invariant: every token id is in the vocabulary, at least one output token fits the context, every number is finite and
in range; `max_tokens` is already clipped to what the context leaves; some token may always be drawn.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from laneproto.v1 import lane_pb2 as pb
from lanes import limits
from lanes.errors import (
    BadGrammar,
    BadSampling,
    ContextExceeded,
    EmptyPrompt,
    RequestError,
    TokenOutOfRange,
    TooManyStopIds,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one lane can serve."""

    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: temperature 0 is greedy; the other defaults are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # ascending ids
    min_tokens: int = 0  # of output, before a stop id may come


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. The last `replayed_tokens` of the prompt are output already and count as such."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int  # of output, replayed ones included
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0
    replayed_tokens: int = 0
    checkpoint_positions: tuple[int, ...] = ()  # numbers of prompt tokens, ascending
    tenant_salt: bytes = b""
    grammar: str = ""  # what the output may be; empty: anything
    interrupts: str = ""  # id of a generation between whose prompt chunks this one may run
    alone_ms: int = 0  # that it has the lane to itself then, before both run by turns

    @property
    def replayed_ids(self) -> tuple[int, ...]:
        """Output that another lane has sent."""
        return self.prompt_ids[len(self.prompt_ids) - self.replayed_tokens :]

    @property
    def new_tokens(self) -> int:
        """At most that many are still to come."""
        return self.max_tokens - self.replayed_tokens


def parse(message: pb.GenerateRequest, bounds: Bounds) -> Request:
    """The checked request of a message; raises a RequestError."""
    request_id = message.request_id
    if not request_id or not _is_id(request_id):
        raise RequestError(f"request_id: 1 to {limits.MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
    if not _is_id(message.interrupts):
        raise RequestError(f"interrupts: at most {limits.MAX_REQUEST_ID_CHARACTERS} printable ASCII characters")
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
    stop_ids = frozenset(message.stop_ids)
    if message.max_tokens < 1:
        raise RequestError("max_tokens: at least 1")
    _check_replay(message, stop_ids)
    _check_state(message)
    if message.top_logprobs > limits.MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs: {message.top_logprobs}, at most {limits.MAX_TOP_LOGPROBS}")
    if message.top_logprobs and not message.logprobs:
        raise RequestError("top_logprobs: needs logprobs")
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=min(message.max_tokens, message.replayed_tokens + room),
        sampling=_sampling(message.sampling, bounds, message.max_tokens, stop_ids),
        stop_ids=stop_ids,
        logprobs=message.logprobs,
        top_logprobs=min(message.top_logprobs, bounds.vocab_size),
        replayed_tokens=message.replayed_tokens,
        checkpoint_positions=tuple(message.checkpoint_positions),
        tenant_salt=message.tenant_salt,
        grammar=message.grammar,
        interrupts=message.interrupts,
        alone_ms=message.alone_ms,
    )


def _check_replay(message: pb.GenerateRequest, stop_ids: frozenset[int]) -> None:
    replayed = message.replayed_tokens
    if replayed >= len(message.prompt_ids):
        raise RequestError("replayed_tokens: fewer than prompt_ids, which begin with a prompt")
    if replayed >= message.max_tokens:
        raise RequestError("replayed_tokens: the answer has max_tokens already")
    if replayed and not stop_ids.isdisjoint(message.prompt_ids[-replayed:]):
        raise RequestError("replayed_tokens: a stop id is among them, so the answer has ended")


def _check_state(message: pb.GenerateRequest) -> None:
    positions = message.checkpoint_positions
    if len(positions) > limits.MAX_CHECKPOINT_HINTS:
        raise RequestError(f"checkpoint_positions: {len(positions)}, at most {limits.MAX_CHECKPOINT_HINTS}")
    if any(a >= b for a, b in itertools.pairwise((0, *positions))) or (
        positions and positions[-1] > len(message.prompt_ids)
    ):
        raise RequestError("checkpoint_positions: ascending numbers of prompt tokens, from 1 on")
    if len(message.grammar.encode()) > limits.MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"grammar: over {limits.MAX_GRAMMAR_BYTES} bytes")
    if len(message.tenant_salt) > limits.MAX_TENANT_SALT_BYTES:
        raise RequestError(f"tenant_salt: {len(message.tenant_salt)} bytes, at most {limits.MAX_TENANT_SALT_BYTES}")


def _sampling(message: pb.Sampling, bounds: Bounds, max_tokens: int, stop_ids: frozenset[int]) -> Sampling:
    _check_number("temperature", message.temperature, 0.0, limits.MAX_TEMPERATURE)
    _check_number("top_p", message.top_p, 0.0, 1.0)
    _check_number("min_p", message.min_p, 0.0, 1.0)
    _check_number("repetition_penalty", message.repetition_penalty, 0.0, limits.MAX_REPETITION_PENALTY)
    _check_number("presence_penalty", message.presence_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    _check_number("frequency_penalty", message.frequency_penalty, -limits.MAX_PENALTY, limits.MAX_PENALTY)
    if len(message.logit_bias) > limits.MAX_LOGIT_BIASES:
        raise BadSampling(f"logit_bias: {len(message.logit_bias)} tokens, at most {limits.MAX_LOGIT_BIASES}")
    _check_ids("logit_bias", tuple(message.logit_bias), bounds.vocab_size)
    for bias in message.logit_bias.values():
        _check_number("logit_bias", bias, -limits.MAX_BIAS, limits.MAX_BIAS)
    if message.min_tokens > max_tokens:
        raise BadSampling("min_tokens: at most max_tokens")
    if message.min_tokens and len(stop_ids) == bounds.vocab_size:
        raise BadSampling("min_tokens: every token is a stop id")
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        seed=message.seed,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        min_tokens=message.min_tokens,
    )


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadSampling(f"{name}: a number from {low:g} to {high:g}")


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if ids and (highest := max(ids)) >= vocab_size:
        raise TokenOutOfRange(f"{name}: {highest} is not below the vocabulary size of {vocab_size}")


def _is_id(text: str) -> bool:
    return len(text) <= limits.MAX_REQUEST_ID_CHARACTERS and text.isascii() and text.isprintable()
